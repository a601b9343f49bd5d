"""Is a text that differs from plain decoding's a rounding error at a near-tie, or a fault?

Both methods decode once more (they are deterministic) and are watched where their texts part. Kernels may round
differently for different numbers of rows, so two methods may choose differently, but only between tokens whose scores
lie within that rounding.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.engine.sampler_state import SamplerState, keep
from secondguess.engine.sampling import perturbed
from secondguess.llm import LLM
from secondguess.types import SamplingParams

# How far rounding moves logits, in steps of the largest one: 20 were measured in float32 with ordinary attention (in
# 16 bits the products are still summed in float32). Logits further apart were computed from different things, and
# without this limit "within twice the difference" would excuse exactly them.
ROUNDING_STEPS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 8, torch.float16: 8}


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that were decoded together: token ids and settings of each. Seeds tell them apart."""

    prompts: Seq[Seq[int]]
    params: Seq[SamplingParams]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a method saw when it chose a token."""

    token: int
    logits_V: Tensor
    scores_V: Tensor  # processed and perturbed; the token should be their argmax


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on one mismatch; ``gap`` and ``difference`` are None if the texts did not part at a choice."""

    position: int  # of the first token that differs, counted in the answer
    gap: float | None  # between the two methods' tokens, in the scores of either method, the larger one
    difference: float | None  # the largest difference between the two methods' scores
    excused: bool


def first_difference(a: Seq[int], b: Seq[int]) -> int:
    """The first index at which two different texts differ; the shorter one's length if it begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def audit(llms: tuple[LLM, LLM], job: Job, index: int, texts: tuple[Seq[int], Seq[int]]) -> Audit:
    """Judge request ``index`` of ``job``. Plain decoding comes first in the pairs, the method that differs second."""
    position = first_difference(*texts)
    if position >= min(map(len, texts)):  # the same choices, but one text went on
        return Audit(position, None, None, False)
    plain, other = (observe(llm, job, index, position, text[position]) for llm, text in zip(llms, texts, strict=True))
    return judge(position, plain, other) if plain and other else Audit(position, None, None, False)


def observe(llm: LLM, job: Job, index: int, position: int, token: int) -> Choice | None:
    """Decode ``job`` again and keep what request ``index`` chose its token at ``position`` from."""
    seed, absolute = job.params[index].seed, len(job.prompts[index]) + position
    seen: list[Choice] = []

    def watch(logits_RV: Tensor, sampler: SamplerState, positions_R: Tensor, active_R: Tensor) -> None:
        for r, row in enumerate(sampler.rows):
            if row.seed == seed and active_R[r] and positions_R[r] == absolute:
                scores_1V = perturbed(logits_RV[r : r + 1], keep(sampler, [r]), positions_R[r : r + 1])
                seen.append(Choice(token, logits_RV[r].clone(), scores_1V[0].clone()))

    with llm.watched(watch):
        llm.generate(job.prompts, job.params)
    return seen[0] if seen else None


def judge(position: int, plain: Choice, other: Choice) -> Audit:
    """Excuse the mismatch iff the scores differ by rounding alone, and the gap is at most twice their difference."""
    gap = max(abs(float(c.scores_V[plain.token] - c.scores_V[other.token])) for c in (plain, other))
    difference = float((plain.scores_V - other.scores_V).abs().max())
    steps = ROUNDING_STEPS[plain.logits_V.dtype] * torch.finfo(plain.logits_V.dtype).eps
    rounding = 0 < float((plain.logits_V - other.logits_V).abs().max()) <= steps * float(plain.logits_V.abs().max())
    return Audit(position, gap, difference, rounding and gap <= 2 * difference)
