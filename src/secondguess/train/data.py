"""Training data: answers that the target wrote itself, and the order in which they are seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from secondguess.errors import UserError


@dataclass(frozen=True, slots=True)
class Response:
    """One answer of the target: prompt and answer as target token ids."""

    id: str
    input_ids: tuple[int, ...]
    prompt_len: int

    @property
    def answer(self) -> tuple[int, ...]:
        return self.input_ids[self.prompt_len :]


def read_responses(path: Path, vocab_size: int) -> list[Response]:
    """Read JSONL rows ``{"id", "prompt_len", "input_ids"}``. Raises UserError naming the line that is wrong."""
    if not path.is_file():
        raise UserError(f"no responses at {path}: give a JSONL file with id, prompt_len and input_ids")
    responses = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            response = Response(str(row["id"]), tuple(row["input_ids"]), int(row["prompt_len"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a response row ({error!r})") from None
        if not 1 <= response.prompt_len < len(response.input_ids):
            raise UserError(f"{path}:{number}: prompt_len {response.prompt_len} leaves no answer to train on")
        if max(response.input_ids) >= vocab_size or min(response.input_ids) < 0:
            raise UserError(f"{path}:{number}: token id outside the target's vocabulary of {vocab_size}: wrong target?")
        responses.append(response)
    if not responses:
        raise UserError(f"{path} holds no responses")
    return responses


def split_held_out(responses: Sequence[Response], share: float) -> tuple[list[int], list[int]]:
    """Indices (training, held-out), by a hash of the id: adding data never moves a row from one side to the other."""
    training: list[int] = []
    held_out: list[int] = []
    for i, response in enumerate(responses):
        digest = hashlib.sha256(response.id.encode()).digest()
        (held_out if int.from_bytes(digest[:4]) < share * 2**32 else training).append(i)
    return training, held_out


def batches(indices: Sequence[int], batch_size: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Shuffled batches of one epoch; a function of (seed, epoch) alone, so that a resumed run sees the same order."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    for i in range(0, len(order) - batch_size + 1, batch_size):
        yield [indices[j] for j in order[i : i + batch_size]]
