"""Answers without their prompts, small enough to be kept beside code: ids, temperatures, seeds and answer tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from secondguess.atomic import replacing
from secondguess.errors import UserError


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote to the prompt called ``id``, with the token that ended it."""

    id: str
    temperature: float
    seed: int
    tokens: tuple[int, ...]
    prompt_len: int | None  # in tokens; None where it was not recorded

    def check_prompt(self, prompt_len: int) -> None:
        """Raises UserError when it was not this prompt that was answered, as far as its length tells."""
        if self.prompt_len not in (None, prompt_len):
            raise UserError(
                f"{self.id} was answered when its prompt had {self.prompt_len} tokens, and now it has {prompt_len}: is "
                "it another target, system prompt or text? Give another --out, or leave out --given"
            )


def answer_of(line: Mapping[str, Any]) -> Answer:
    """From a line of an answer file."""
    prompt_len, input_ids = line["prompt_len"], line["input_ids"]
    return Answer(line["id"], line["temperature"], line["seed"], tuple(input_ids[prompt_len:]), prompt_len)


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """One tensor of all tokens (uint16), and the rest as JSON in the file's header. Needs a vocabulary below 65,536."""
    made = list(answers)
    tokens = torch.tensor([t for a in made for t in a.tokens], dtype=torch.int32)
    if tokens.numel() and int(tokens.max()) >= 1 << 16:
        raise UserError("these answers have tokens above 65,535, which this format cannot hold")
    index = json.dumps([[a.id, a.temperature, a.seed, len(a.tokens), a.prompt_len] for a in made])
    with replacing(path) as temporary:
        save_file({"tokens": tokens.to(torch.uint16)}, temporary, {"answers": index})


def read_answers(path: Path) -> dict[str, Answer]:
    """By id. Raises UserError when the file is not one that ``write_answers`` wrote, now or before it kept lengths of
    prompts.
    """
    try:
        with safe_open(path, "pt") as file:
            index = json.loads(file.metadata()["answers"])
            tokens = file.get_tensor("tokens").tolist()
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no answers: {error}") from error
    found, start = {}, 0
    for id_, temperature, seed, length, *prompt_len in index:
        answer = tuple(tokens[start : start + length])
        found[id_] = Answer(id_, temperature, seed, answer, prompt_len[0] if prompt_len else None)
        start += length
    return found
