"""What the results of a benchmark say. Pure functions.

``results`` and ``plain`` are one method's results and plain decoding's, of the same prompts in the same order. Numbers
that nothing was measured for are None: no decode cycle (answers of one token), no prompt that does not loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import mean
from typing import Any

import numpy as np

from secondguess.bench.plan import row_of
from secondguess.bench.result import Result
from secondguess.types import Stats

LOOP_NGRAM = 4
RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)
_INTERVALS = ("speedup_low", "speedup_high", "speedup_median", "speedup_median_low", "speedup_median_high")


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether over half of a text's 4-grams occurred in it before. Such text flatters every drafter."""
    ngrams = list(zip(*(token_ids[i:] for i in range(LOOP_NGRAM)), strict=False))
    return len(ngrams) - len(set(ngrams)) > len(ngrams) / 2


def acceptance_length(results: Iterable[Result]) -> float | None:
    """tau, token-weighted: decode tokens of all requests, those cut off at the end included, per cycle."""
    stats = [r.stats for r in results]
    cycles = sum(s.num_cycles for s in stats)
    return (sum(s.num_accepted for s in stats) + cycles) / cycles if cycles else None


def acceptance_length_mean(results: Iterable[Result]) -> float | None:
    """The mean over prompts of their acceptance lengths."""
    each = [length for r in results if (length := acceptance_length([r])) is not None]
    return mean(each) if each else None


def per_cycle(results: Iterable[Result], count: str) -> float | None:
    """The mean over the cycles of all requests of something that ``Stats`` counts."""
    stats = [r.stats for r in results]
    cycles = sum(s.num_cycles for s in stats)
    return sum(getattr(s, count) for s in stats) / cycles if cycles else None


def group_costs(results: Sequence[Result]) -> list[tuple[int, Stats]]:
    """Decode tokens of each group decoded together, and the stats of its longest request.

    A group's requests are all prefilled before its first cycle, so that request took part in every cycle: its
    cycles and times are the group's.
    """
    groups = [[r.stats for r in group] for _, group in groupby(results, lambda r: r.group)]
    return [(sum(s.num_tokens for s in group), max(group, key=lambda s: s.num_cycles)) for group in groups]


def unit_costs(results: Sequence[Result]) -> list[tuple[int, float]]:
    """Decode tokens and seconds of each unit that resampling draws: a task's row, all its turns and rounds together.

    What is decoded together cannot be told apart: then a unit is the rows of a group, in all rounds.
    """
    units: dict[tuple[tuple[str, str], ...], tuple[int, float]] = {}
    for _, group in groupby(results, lambda r: r.group):
        members = list(group)
        unit = tuple((r.key.task, row_of(r.key.id)) for r in members)
        ((tokens, longest),) = group_costs(members)
        tokens_before, seconds_before = units.get(unit, (0, 0.0))
        units[unit] = tokens_before + tokens, seconds_before + longest.decode_s
    return list(units.values())


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
    """The mean over units (see ``unit_costs``) of their speedups, as Spec-Bench reports it over prompts."""
    table = paired_costs(results, plain)
    return mean((n / s) / (m / t) for n, s, m, t in table) if table else None


def paired_costs(results: Sequence[Result], plain: Sequence[Result]) -> list[tuple[int, float, int, float]]:
    """Of each unit: tokens and seconds, and plain decoding's. Units for which nothing was timed are left out."""
    pairs = zip(unit_costs(results), unit_costs(plain), strict=True)
    return [(*ours, *theirs) for ours, theirs in pairs if all(ours) and all(theirs)]


def speedup_intervals(results: Sequence[Result], plain: Sequence[Result]) -> dict[str, float | None]:
    """The 95 % interval of the micro speedup, and the median of the units' speedups with its own.

    Percentile bootstrap over units (see ``unit_costs``); both methods' times of a unit stay together.
    """
    table = paired_costs(results, plain)
    if not table:
        return dict.fromkeys(_INTERVALS)
    table_P4 = np.array(table)
    picks_SP = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    tokens_S, seconds_S, their_tokens_S, their_seconds_S = table_P4[picks_SP].sum(1).T
    ratios_P = (table_P4[:, 0] / table_P4[:, 1]) / (table_P4[:, 2] / table_P4[:, 3])
    micro_S = (tokens_S / seconds_S) / (their_tokens_S / their_seconds_S)
    medians_S = np.median(ratios_P[picks_SP], 1)
    found = [*np.percentile(micro_S, INTERVAL), np.median(ratios_P), *np.percentile(medians_S, INTERVAL)]
    return dict(zip(_INTERVALS, map(float, found), strict=True))


def without_loops(results: Sequence[Result], plain: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Both methods' results of the groups in which no plain text loops."""
    looping = {p.group for p in plain if is_looping(p.token_ids)}
    ours, theirs = ([r for r in side if r.group not in looping] for side in (results, plain))
    return ours, theirs


def speedup_over(results: Sequence[Result], others: Sequence[Result], name: str) -> dict[str, float | None]:
    """``name``, ``name_low``, ``name_high``: the micro speedup and its 95 % interval, over what neither failed at."""
    pairs = [(r, o) for r, o in zip(results, others, strict=True) if r.error is None and o.error is None]
    ours, theirs = [r for r, _ in pairs], [o for _, o in pairs]
    found = speedup_intervals(ours, theirs)
    return {
        name: speedup_micro(ours, theirs),
        f"{name}_low": found["speedup_low"],
        f"{name}_high": found["speedup_high"],
    }


def unaccounted(results: Sequence[Result]) -> float | None:
    """The share of the calls' wall time that prefills and cycles do not explain."""
    groups = [list(group) for _, group in groupby(results, lambda r: r.group)]
    wall_s = sum(group[0].wall_s for group in groups)
    decode_s = sum(longest.decode_s for _, longest in group_costs(results))
    return 1 - (decode_s + sum(r.stats.prefill_s for r in results)) / wall_s if wall_s else None


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
    """The measured part of a bench row, over the results for which neither method failed.

    Where none is left, only counts.
    """
    errors = [r.error for r in results if r.error is not None]
    pairs = [(r, p) for r, p in zip(results, plain, strict=True) if r.error is None and p.error is None]
    failed = {"num_failed": len(errors), "error": errors[0] if errors else None}
    if not pairs:
        return {"num_prompts": 0, "num_tokens": 0, "num_cycles": 0, **failed}
    ours, theirs = [r for r, _ in pairs], [p for _, p in pairs]
    flowing = [r for r, p in pairs if not is_looping(p.token_ids)]
    micro = speedup_micro(ours, theirs)
    return {
        "num_prompts": len({(r.key.task, r.key.id) for r in ours}),
        "num_tokens": sum(r.stats.num_tokens for r in ours),
        "num_cycles": sum(r.stats.num_cycles for r in ours),
        "acceptance_length": acceptance_length(ours),
        "acceptance_length_nonlooping": acceptance_length(flowing),
        "acceptance_length_mean": acceptance_length_mean(ours),
        "mean_nodes": per_cycle(ours, "num_drafted"),
        "mean_steps": per_cycle(ours, "num_steps"),
        "tokens_per_second": tokens_per_second(ours),
        "speedup_vs_ar": micro,
        "speedup_micro": micro,
        "speedup_macro": speedup_macro(ours, theirs),
        **speedup_intervals(ours, theirs),
        **speedup_over(*without_loops(ours, theirs), "speedup_nonlooping"),
        **milliseconds(ours),
        "unaccounted": unaccounted(ours),
        "identical_to_ar": identical(ours, theirs),
        "looping": 1 - len(flowing) / len(ours),
        "peak_memory_bytes": max(r.peak_memory_bytes for r in ours),
        **failed,
    }
