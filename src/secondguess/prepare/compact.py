"""Answers without their prompts, small enough to be kept beside code: ids, temperatures, seeds and answer tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from secondguess import digests
from secondguess.atomic import replacing
from secondguess.errors import UserError


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote to the prompt called ``id``, with the token that ended it.

    None stands for what was not recorded.
    """

    id: str
    temperature: float
    seed: int | None
    tokens: tuple[int, ...]
    prompt_len: int | None  # in tokens
    prompt_digest: str | None  # of its tokens, see ``digests``

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises UserError when it was not this prompt that was answered, as far as is known."""
        if self.prompt_len not in (None, len(prompt_ids)):
            then = f"had {self.prompt_len} tokens, and now it has {len(prompt_ids)}"
        elif self.prompt_digest not in (None, digests.of_tokens(prompt_ids)):
            then = f"had other tokens, {len(prompt_ids)} as now"
        else:
            return
        raise UserError(
            f"{self.id} was answered when its prompt {then}: is it another target, system prompt or text? Give another "
            "--out, or leave out --given"
        )


def answer_of(line: Mapping[str, Any]) -> Answer:
    """From a line of an answer file."""
    prompt_len, input_ids = line["prompt_len"], line["input_ids"]
    digest = digests.of_tokens(input_ids[:prompt_len])
    return Answer(line["id"], line["temperature"], line.get("seed"), tuple(input_ids[prompt_len:]), prompt_len, digest)


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """One tensor of all tokens (uint16, or uint32 where one needs it), and the rest as JSON in the file's header."""
    made = list(answers)
    tokens = torch.tensor([t for a in made for t in a.tokens], dtype=torch.int64)
    narrow = not tokens.numel() or int(tokens.max()) < 1 << 16
    index = [[a.id, a.temperature, a.seed, len(a.tokens), a.prompt_len, a.prompt_digest] for a in made]
    with replacing(path) as temporary:
        found = {"tokens": tokens.to(torch.uint16 if narrow else torch.uint32)}
        save_file(found, temporary, {"answers": json.dumps(index)})


def read_answers(path: Path) -> dict[str, Answer]:
    """By id. Raises UserError when the file is not one that ``write_answers`` wrote, now or before it kept lengths and
    digests of prompts.
    """
    try:
        with safe_open(path, "pt") as file:
            index = json.loads(file.metadata()["answers"])
            tokens = file.get_tensor("tokens").tolist()
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no answers: {error}") from error
    found, start = {}, 0
    for id_, temperature, seed, length, *of_prompt in index:
        prompt_len, digest = [*of_prompt, None, None][:2]
        found[id_] = Answer(id_, temperature, seed, tuple(tokens[start : start + length]), prompt_len, digest)
        start += length
    return found
