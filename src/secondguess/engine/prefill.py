"""What a request begins with: its prompt is read, and its first token emitted. One that was sent back is read again.

P tokens of the prompt, T tokens of the text, V vocabulary, L tapped layers, H hidden size.
"""

from __future__ import annotations

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


def prefill(engine: Engine, s: Sequence) -> Batch:
    """Run the prompt, emit the first token, and give the speculator the prompt's states."""
    started = perf_counter()
    spec, request = engine.target.spec, s.request
    prompt_P = torch.tensor(s.token_ids, device=spec.device)
    out = read(engine, s.slot, prompt_P)
    eos_ids = tuple(spec.eos_token_ids)
    sampler = start([request], [s.seed], vocab_size=spec.vocab_size, eos_ids=eos_ids, device=spec.device)
    first_1 = first_token(engine, sampler, out.logits_RNV[:, -1], len(prompt_P))
    tokens_P = torch.cat([prompt_P[1:], first_1])
    engine.speculator.accept([Accepted(s.slot, tokens_P, out.taps_RNLH[0], request.speculation)])
    emit(engine, s, tokens_P, out)
    if request.counted:
        engine.totals.num_prompt_tokens += len(prompt_P)
        engine.totals.num_tokens += 1
    s.timing.prefill = perf_counter() - started
    return Batch([s], sampler)


def resume(engine: Engine, s: Sequence, sampler: SamplerState) -> Batch:
    """Read what a request had in its cache before it was sent back, all of its text but the newest token.

    It emits nothing. Then it stands where it stood: its next tokens depend on nothing else, and ``sampler`` is its own.
    """
    started = perf_counter()
    text_T = torch.tensor(s.token_ids, device=engine.target.spec.device)
    out = read(engine, s.slot, text_T[:-1])
    engine.speculator.accept([Accepted(s.slot, text_T[1:], out.taps_RNLH[0], s.request.speculation)])
    s.timing.prefill += perf_counter() - started
    return Batch([s], sampler)


def read(engine: Engine, slot: int, tokens_P: Tensor) -> TargetOut:
    """The target's pass over tokens that a slot begins with; logits of the last alone."""
    engine.last = None
    rows = causal_rows(torch.tensor([slot], device=tokens_P.device), tokens_P[None])
    return engine.target.forward(rows, engine.cache, last_only=True)


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
