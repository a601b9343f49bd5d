"""What the results of a benchmark say. Pure functions.

``results`` and ``plain`` are one method's results and plain decoding's, of the same prompts in the same order. Numbers
that nothing was measured for are None: no decode cycle (answers of one token), no prompt that does not loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import mean
from typing import Any

from secondguess.bench.result import Result
from secondguess.types import Stats

LOOP_NGRAM = 4


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether over half of a text's 4-grams occurred in it before. Such text flatters every drafter."""
    ngrams = list(zip(*(token_ids[i:] for i in range(LOOP_NGRAM)), strict=False))
    return len(ngrams) - len(set(ngrams)) > len(ngrams) / 2


def acceptance_length(results: Iterable[Result]) -> float | None:
    """tau, token-weighted: decode tokens of all requests, those cut off at the end included, per cycle."""
    stats = [r.stats for r in results]
    cycles = sum(s.num_cycles for s in stats)
    return (sum(s.num_accepted for s in stats) + cycles) / cycles if cycles else None


def group_costs(results: Sequence[Result]) -> list[tuple[int, Stats]]:
    """Decode tokens of each group decoded together, and the stats of its longest request.

    A group's requests are all prefilled before its first cycle, so that request took part in every cycle: its
    cycles and times are the group's.
    """
    groups = [[r.stats for r in group] for _, group in groupby(results, lambda r: r.group)]
    return [(sum(s.num_tokens for s in group), max(group, key=lambda s: s.num_cycles)) for group in groups]


def tokens_per_second(results: Sequence[Result]) -> float | None:
    """Decode tokens per second of decoding, prefill left out; of a batch, the sum over its requests."""
    costs = group_costs(results)
    seconds = sum(longest.decode_s for _, longest in costs)
    return sum(tokens for tokens, _ in costs) / seconds if seconds else None


def speedup_micro(results: Sequence[Result], plain: Sequence[Result]) -> float | None:
    """All tokens over all seconds, relative to plain decoding: what a user of the whole set waits less."""
    ours, theirs = tokens_per_second(results), tokens_per_second(plain)
    return ours / theirs if ours and theirs else None


def speedup_macro(results: Sequence[Result], plain: Sequence[Result]) -> float | None:
    """The mean over groups (prompts, at batch size 1) of their speedups, as Spec-Bench reports it."""
    pairs = zip(group_costs(results), group_costs(plain), strict=True)
    ratios = [
        (tokens / ours.decode_s) / (plain_tokens / theirs.decode_s)
        for (tokens, ours), (plain_tokens, theirs) in pairs
        if tokens and plain_tokens
    ]
    return mean(ratios) if ratios else None


def identical(results: Sequence[Result], plain: Sequence[Result]) -> float:
    """The share of prompts whose token ids equal plain decoding's."""
    return mean(r.token_ids == p.token_ids for r, p in zip(results, plain, strict=True))


def milliseconds(results: Sequence[Result]) -> dict[str, float | None]:
    """Means over cycles: draft + verify + walk + rest = cycle. Prefill is a mean over requests."""
    longest = [stats for _, stats in group_costs(results)]
    cycles = sum(s.num_cycles for s in longest)
    times = {}
    for part, field in {
        "cycle": "decode_s",
        **{part: f"{part}_s" for part in ("draft", "verify", "walk", "rest")},
    }.items():
        times[f"{part}_ms"] = sum(getattr(s, field) for s in longest) * 1e3 / cycles if cycles else None
    return times | {"prefill_ms": mean(r.stats.prefill_s for r in results) * 1e3}


def measure(results: Sequence[Result], plain: Sequence[Result]) -> dict[str, Any]:
    """The measured part of a bench row."""
    flowing = [r for r, p in zip(results, plain, strict=True) if not is_looping(p.token_ids)]
    micro = speedup_micro(results, plain)
    return {
        "num_prompts": len(results),
        "num_tokens": sum(r.stats.num_tokens for r in results),
        "num_cycles": sum(r.stats.num_cycles for r in results),
        "acceptance_length": acceptance_length(results),
        "acceptance_length_nonlooping": acceptance_length(flowing),
        "tokens_per_second": tokens_per_second(results),
        "speedup_vs_ar": micro,
        "speedup_micro": micro,
        "speedup_macro": speedup_macro(results, plain),
        **milliseconds(results),
        "identical_to_ar": identical(results, plain),
        "looping": 1 - len(flowing) / len(results),
    }
