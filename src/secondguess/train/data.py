"""Training data: answers that the target wrote itself, and the order in which they are seen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import torch

from secondguess.errors import UserError


@dataclass(frozen=True, slots=True)
class Response:
    """One answer of the target: prompt and answer as target token ids."""

    id: str
    input_ids: tuple[int, ...]
    prompt_len: int
    temperature: float | None = None  # that it was written at, where the data says so
    variables: str = "{}"  # JSON: what the chat template was given besides, where the data says so

    @property
    def answer(self) -> tuple[int, ...]:
        return self.input_ids[self.prompt_len :]


def read_responses(path: Path, vocab_size: int, say: Callable[[str], None] = lambda text: None) -> list[Response]:
    """Read JSONL rows ``{"id", "prompt_len", "input_ids"}`` and, if given, "temperature" and "template_variables".

    ``say`` hears of rows too short to train on, and of ids that return (see ``split_held_out``).

    Raises UserError naming the line that is wrong.
    """
    if not path.is_file():
        raise UserError(f"no responses at {path}: give a JSONL file with id, prompt_len and input_ids")
    try:
        # Not str.splitlines, which would also split at the line separators that Unicode has.
        with path.open(encoding="utf-8") as file:
            rows = [parse_response(line, f"{path}:{number}", vocab_size) for number, line in enumerate(file, 1)]
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: give a JSONL file") from None
    # The first token of an answer comes from prefill, so the second is the first that can be drafted.
    responses = [row for row in rows if len(row.answer) > 1]
    if not responses:
        raise UserError(f"{path} holds no responses with an answer of two tokens or more")
    if len(responses) < len(rows):
        say(f"{len(rows) - len(responses)} of {len(rows)} responses left out: answers of one token train nothing")
    if repeated := len(responses) - len({r.id for r in responses}):
        say(f"{repeated} of {len(rows)} responses left out: an earlier one has their id")
    return responses


def parse_response(line: str, where: str, vocab_size: int) -> Response:
    try:
        row = json.loads(line)
        ids, prompt_len = tuple(row["input_ids"]), row["prompt_len"]
        variables = json.dumps(row.get("template_variables", {}), sort_keys=True)
        response = Response(str(row["id"]), ids, prompt_len, row.get("temperature"), variables)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else f"not JSON: {error}"
        raise UserError(f"{where}: not a response row, {what}") from None
    if not all(type(n) is int for n in (response.prompt_len, *response.input_ids)):
        raise UserError(f"{where}: prompt_len and input_ids must be whole numbers")
    if type(response.temperature) not in (NoneType, int, float):
        raise UserError(f"{where}: temperature must be a number, got {response.temperature!r}")
    if not variables.startswith("{"):
        raise UserError(f"{where}: template_variables must be an object, got {variables}")
    if not 1 <= response.prompt_len < len(response.input_ids):
        raise UserError(f"{where}: prompt_len {response.prompt_len} leaves no answer to train on")
    if max(response.input_ids) >= vocab_size or min(response.input_ids) < 0:
        raise UserError(f"{where}: token id outside the target's vocabulary of {vocab_size}: wrong target?")
    return response


def check_lengths(responses: Sequence[Response], context_len: int) -> None:
    """Raises UserError naming the first response that the target could not have read."""
    for r in responses:
        if len(r.input_ids) > context_len:
            room = f"has {len(r.input_ids)} tokens, the target's context holds {context_len}"
            raise UserError(f"response {r.id} {room}: leave it out or shorten it")


def digest(responses: Sequence[Response]) -> str:
    """Changes when any response does, or their order."""
    rows = [(r.id, r.prompt_len, r.input_ids) for r in responses]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


LATER_TURN = re.compile(r"#([2-9]|[1-9]\d+)$")


def split_held_out(responses: Sequence[Response], share: float) -> tuple[list[int], list[int]]:
    """Indices (training, held-out), by a hash of the id: adding data never moves a row from one side to the other.

    Turns of one conversation (``ID``, ``ID#2``, ...) stay together: a later one holds the text of those before. Of
    responses with one id the first counts. The hash is not the one that ``prepare`` goes by, which answers small ones
    first: of an interrupted run all would be held out.
    """
    training: list[int] = []
    held_out: list[int] = []
    firsts = {response.id: i for i, response in reversed([*enumerate(responses)])}
    for i in sorted(firsts.values()):
        response = responses[i]
        # "surrogatepass": JSON may escape half of a character.
        conversation = LATER_TURN.sub("", response.id).encode(errors="surrogatepass")
        hashed = hashlib.sha256(b"held out\n" + conversation).digest()
        (held_out if int.from_bytes(hashed[:4]) < share * 2**32 else training).append(i)
    return training, held_out


def batches(indices: Sequence[int], batch_size: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Shuffled batches of one epoch; a function of (seed, epoch) alone, so that a resumed run sees the same order."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    for i in range(0, len(order) - batch_size + 1, batch_size):
        yield [indices[j] for j in order[i : i + batch_size]]
