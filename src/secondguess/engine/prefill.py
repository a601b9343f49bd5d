"""What a request begins with: its prompt is read, and its first token emitted. One that was sent back is read again.

P tokens of the prompt, T tokens of the text, N of a piece, V vocabulary, L tapped layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """A request whose text is read into its slot, piece by piece. They are the same ones whatever runs beside it, so
    that no bit depends on that.
    """

    sequence: Sequence
    tokens_T: Tensor  # int64: all of its text, or if it was sent back all but the newest token
    sampler: SamplerState | None  # if it was sent back: its own
    pieces: list[TargetOut] = field(default_factory=list)  # with logits of the last row alone
    num_read: int = 0


def begin(engine: Engine, s: Sequence, sampler: SamplerState | None) -> Reading:
    ids = s.token_ids if sampler is None else s.token_ids[:-1]
    return Reading(s, torch.tensor(ids, device=engine.target.spec.device), sampler)


def share(engine: Engine, reading: Reading, other: Reading) -> None:
    """Take over the prompt of a request that runs, which is the same: bit for bit what reading it again would give."""
    engine.cache.copy(other.sequence.slot, reading.sequence.slot, other.num_read)
    reading.pieces, reading.num_read = other.pieces, other.num_read


def read_on(engine: Engine, reading: Reading) -> Batch | None:
    """Read the next piece. After the last one, the request as a batch by itself, ready for cycles."""
    started, batch = perf_counter(), None
    engine.last = None
    if reading.num_read < len(reading.tokens_T):
        read_piece(engine, reading)
    if reading.num_read == len(reading.tokens_T):
        reading.pieces = [whole(reading.pieces)]
        batch = (begun if reading.sampler is None else resumed)(engine, reading, reading.pieces[0])
    reading.sequence.timing.prefill += perf_counter() - started
    return batch


def read_piece(engine: Engine, reading: Reading) -> None:
    before = reading.num_read
    piece_1N = reading.tokens_T[None, before : before + PIECE]
    rows = causal_rows(torch.tensor([reading.sequence.slot], device=piece_1N.device), piece_1N, before)
    reading.pieces.append(engine.target.forward(rows, engine.cache, last_only=True))
    reading.num_read += piece_1N.shape[1]


def whole(pieces: list[TargetOut]) -> TargetOut:
    if len(pieces) == 1:
        return pieces[0]
    hidden_RNH, taps_RNLH = (torch.cat([getattr(p, name) for p in pieces], 1) for name in ("hidden_RNH", "taps_RNLH"))
    return TargetOut(hidden_RNH, taps_RNLH, pieces[-1].logits_RNV)


def begun(engine: Engine, reading: Reading, out: TargetOut) -> Batch:
    """Emit the first token, and give the speculator the prompt's states."""
    spec, s, prompt_P = engine.target.spec, reading.sequence, reading.tokens_T
    request = s.request
    eos_ids = tuple(spec.eos_token_ids)
    sampler = start([request], [s.seed], vocab_size=spec.vocab_size, eos_ids=eos_ids, device=spec.device)
    first_1 = first_token(engine, sampler, out.logits_RNV[:, -1], len(prompt_P))
    tokens_P = torch.cat([prompt_P[1:], first_1])
    engine.speculator.accept([Accepted(s.slot, tokens_P, out.taps_RNLH[0], request.speculation)])
    emit(engine, s, tokens_P, out)
    if request.counted:
        engine.totals.num_prompt_tokens += len(prompt_P)
        engine.totals.num_tokens += 1
    return Batch([s], sampler)


def resumed(engine: Engine, reading: Reading, out: TargetOut) -> Batch:
    """Give the speculator the states of a text that is in the cache again, all but its newest token.

    It emits nothing. Then it stands where it stood: its next tokens depend on nothing else, and the sampler is its own.
    """
    assert reading.sampler is not None, "it was sent back"
    s = reading.sequence
    tokens_T = torch.tensor(s.token_ids[1:], device=reading.tokens_T.device)
    engine.speculator.accept([Accepted(s.slot, tokens_T, out.taps_RNLH[0], s.request.speculation)])
    return Batch([s], reading.sampler)


def first_token(engine: Engine, sampler: SamplerState, logits_1V: Tensor, length: int) -> Tensor:
    """int64 [1]: the token after a prompt of so many, recorded."""
    position_1 = torch.tensor([length], device=logits_1V.device)
    token_1 = choose(logits_1V, sampler, position_1)
    if engine.watch:
        engine.watch(logits_1V, sampler, position_1, position_1 > 0)
    record(sampler, token_1, position_1 > 0)
    return token_1


def emit(engine: Engine, s: Sequence, tokens_P: Tensor, out: TargetOut) -> None:
    """Hand the request its first token, the last of ``tokens_P``, and the log-probabilities that it wants."""
    params, first_1 = s.request.params, tokens_P[-1:]
    if params.prompt_logprobs is not None and len(tokens_P) > 1:
        s.prompt_logprobs = score_prompt(engine.target, out.hidden_RNH[0, :-1], tokens_P[:-1], params.prompt_logprobs)
    scored = None if params.logprobs is None else score(out.logits_RNV[:, -1], first_1, params.logprobs)[0]
    s.emit(int(first_1), "prefill", scored)
