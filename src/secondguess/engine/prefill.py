"""What a request begins with: its prompt is read, and its first token emitted. One that was sent back is read again.

P tokens of the prompt, T tokens of the text, N of a piece, V vocabulary, L tapped layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from secondguess.engine.cycle import Batch, Engine
from secondguess.engine.logprobs import score, score_prompt
from secondguess.engine.sampler_state import SamplerState, record, start
from secondguess.engine.sampling import choose
from secondguess.engine.sequence import Sequence
from secondguess.engine.speculate import Accepted
from secondguess.target.base import causal_rows
from secondguess.types import TargetOut

PIECE = 512  # tokens that are read at once; others that run have a cycle in between


@dataclass(slots=True)
class Reading:
    """A request whose text is read into its slot, piece by piece, by target and drafter. Pieces end at multiples of
    ``PIECE`` whatever runs beside it and wherever it begins, so that where bits depend on them, few do.
    """

    sequence: Sequence
    tokens_T: Tensor  # int64: all of its text, or if it was sent back all but the newest token
    sampler: SamplerState | None  # if it was sent back: its own
    num_read: int  # those that were there already included


def begin(engine: Engine, s: Sequence, sampler: SamplerState | None, num_reused: int) -> Reading:
    """``num_reused``: tokens that are in its slot already, in the target's cache and in the drafter's."""
    tokens_T = torch.tensor(text_to_read(s, sampler), device=engine.target.spec.device)
    if sampler is None:
        s.num_reused = num_reused
    return Reading(s, tokens_T, sampler, num_reused)


def text_to_read(s: Sequence, sampler: SamplerState | None) -> list[int]:
    return s.token_ids if sampler is None else s.token_ids[:-1]


def read_on(engine: Engine, reading: Reading) -> Batch | None:
    """Read the next piece. After the last one, the request as a batch by itself, ready for cycles."""
    started, first, batch = perf_counter(), reading.num_read, None
    engine.last = None
    out = read_piece(engine, reading)
    following_N = reading.tokens_T[first + 1 : reading.num_read + 1]  # after the last token, one less
    if reading.sampler is None:
        add_prompt_logprobs(engine, reading.sequence, out, following_N)
    if reading.num_read == len(reading.tokens_T):
        batch = (begun if reading.sampler is None else resumed)(engine, reading, out, following_N)
    else:
        engine.speculator.accept([Accepted(reading.sequence.slot, following_N, out.taps_RNLH[0])])
    reading.sequence.timing.prefill += perf_counter() - started
    return batch


def read_piece(engine: Engine, reading: Reading) -> TargetOut:
    """With logits of the last row alone."""
    first, end = reading.num_read, (reading.num_read // PIECE + 1) * PIECE
    piece_1N = reading.tokens_T[None, first:end]
    rows = causal_rows(torch.tensor([reading.sequence.slot], device=piece_1N.device), piece_1N, first)
    reading.num_read += piece_1N.shape[1]
    return engine.target.forward(rows, engine.cache, last_only=True)


def begun(engine: Engine, reading: Reading, out: TargetOut, following_N: Tensor) -> Batch:
    """Emit the first token, and give the speculator the last piece's states."""
    spec, s = engine.target.spec, reading.sequence
    eos_ids = tuple(spec.eos_token_ids)
    sampler = start([s.request], [s.seed], vocab_size=spec.vocab_size, eos_ids=eos_ids, device=spec.device)
    first_1 = first_token(engine, sampler, out.logits_RNV[:, -1], len(reading.tokens_T))
    engine.speculator.accept([Accepted(s.slot, torch.cat([following_N, first_1]), out.taps_RNLH[0])])
    emit(engine, s, first_1, out)
    return Batch([s], sampler)


def resumed(engine: Engine, reading: Reading, out: TargetOut, following_N: Tensor) -> Batch:
    """Give the speculator the states of a text that is in the cache again, all but its newest token.

    It emits nothing. Then it stands where it stood: its next tokens depend on nothing else, and the sampler is its own.
    """
    assert reading.sampler is not None, "it was sent back"
    s = reading.sequence
    newest_1 = torch.tensor(s.token_ids[-1:], device=following_N.device)
    engine.speculator.accept([Accepted(s.slot, torch.cat([following_N, newest_1]), out.taps_RNLH[0])])
    return Batch([s], reading.sampler)


def first_token(engine: Engine, sampler: SamplerState, logits_1V: Tensor, length: int) -> Tensor:
    """int64 [1]: the token after a prompt of so many, recorded."""
    position_1 = torch.tensor([length], device=logits_1V.device)
    token_1 = choose(logits_1V, sampler, position_1)
    if engine.watch:
        engine.watch(logits_1V, sampler, position_1, position_1 > 0)
    record(sampler, token_1, position_1 > 0)
    return token_1


def add_prompt_logprobs(engine: Engine, s: Sequence, out: TargetOut, following_N: Tensor) -> None:
    """``following_N``: the prompt's tokens after those of the piece."""
    num_best = s.request.params.prompt_logprobs
    if num_best is not None and len(following_N):
        hidden_NH = out.hidden_RNH[0, : len(following_N)]
        s.prompt_logprobs += score_prompt(engine.target, hidden_NH, following_N, num_best)


def emit(engine: Engine, s: Sequence, first_1: Tensor, out: TargetOut) -> None:
    """Hand the request its first token, and count it."""
    num_best = s.request.params.logprobs
    scored = None if num_best is None else score(out.logits_RNV[:, -1], first_1, num_best)[0]
    s.emit(int(first_1), "prefill", scored)
    if s.request.counted:
        engine.totals.num_prompt_tokens += len(s.request.prompt_ids)
        engine.totals.num_reused_tokens += s.num_reused
        engine.totals.num_tokens += 1
