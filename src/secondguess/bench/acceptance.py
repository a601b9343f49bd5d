"""What replayed cycles drafted and accepted, counted per text, and the numbers of ``eval``'s rows. Pure functions.

C conversations, S resamples of them; K sums, tokens and cycles of each method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secondguess.engine.cycle import CycleTrace
from secondguess.types import DraftTree

RESAMPLES = 10_000
LEVELS = 2

Estimate = tuple[float, float, float]  # a number and the ends of its 95 % interval


@dataclass(slots=True)
class Tally:
    """The cycles of one text."""

    looping: bool
    conversation: str | None = None  # whose turn it is; none: it stands alone
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # accepted draft tokens of a cycle: how often
    drafted: list[int] = field(default_factory=lambda: [0] * LEVELS)  # nodes, by level
    accepted: list[int] = field(default_factory=lambda: [0] * LEVELS)
    repeated: int = 0  # drafted nodes with the parent and the token of an earlier one: wasted budget

    @property
    def num_cycles(self) -> int:
        return self.accepted_lengths.total()

    @property
    def num_emitted(self) -> int:
        return sum(self.accepted) + self.num_cycles

    def counts(self) -> list[int]:
        """All that was counted: drafted and accepted by level, repeated, then the cycles that accepted 0, 1, 2, ..."""
        cycles = [self.accepted_lengths[n] for n in range(max(self.accepted_lengths, default=-1) + 1)]
        return [*self.drafted, *self.accepted, self.repeated, *cycles]

    @classmethod
    def of(cls, looping: bool, conversation: str, counts: Sequence[int]) -> Tally:
        """With what ``counts`` told."""
        cycles = Counter({n: count for n, count in enumerate(counts[5:]) if count})
        return cls(looping, conversation, cycles, list(counts[:2]), list(counts[2:4]), counts[4])


def count(tallies: Sequence[Tally], texts: Sequence[int], trace: CycleTrace) -> None:
    """Add a cycle; ``texts`` are the indices of the tallies that the rows of the trace belong to."""
    tree, verdict = trace.tree, trace.verdict
    node_RN = tree.valid_RN & (tree.depths_RN > 0)
    drafted_R2 = [[int(n) for n in ((tree.levels_RN == level) & node_RN).sum(1)] for level in range(LEVELS)]
    repeated_R = repeated(tree, node_RN).tolist()
    paths, lengths = verdict.path_RD.tolist(), verdict.num_emitted_R.tolist()
    levels = tree.levels_RN.tolist()
    for r, i in enumerate(texts):
        tally = tallies[i]
        tally.accepted_lengths[lengths[r] - 1] += 1
        tally.repeated += repeated_R[r]
        for node in paths[r][1 : lengths[r]]:
            tally.accepted[levels[r][node]] += 1
        for level in range(LEVELS):
            tally.drafted[level] += drafted_R2[level][r]


def repeated(tree: DraftTree, node_RN: Tensor) -> Tensor:
    """int64 [R]: how many of the nodes have a sibling before them with the same token."""
    place_RN = torch.stack((tree.parents_RN, tree.tokens_RN), -1)
    same_RNN = (place_RN[:, :, None] == place_RN[:, None]).all(-1) & node_RN[:, :, None] & node_RN[:, None]
    return same_RNN.tril(-1).any(-1).sum(-1)


def acceptance_length(tallies: Sequence[Tally]) -> float | None:
    """tau, token-weighted; None without a cycle."""
    cycles = sum(t.num_cycles for t in tallies)
    return sum(t.num_emitted for t in tallies) / cycles if cycles else None


def by_depth(tallies: Sequence[Tally]) -> list[float]:
    """Of the cycles that accepted a token at depth d - 1 (the root is at 0), the share that did at d = 1, 2, ..."""
    lengths = sum((t.accepted_lengths for t in tallies), Counter())
    reached = [sum(n for length, n in lengths.items() if length >= d) for d in range(max(lengths, default=0) + 1)]
    return [deeper / above for above, deeper in pairwise(reached)]


def tau_with_interval(tallies: Sequence[Tally]) -> Estimate | None:
    """None without a cycle."""
    return estimate(by_conversation(tallies), tau_of)


def paired_gain(ours: Sequence[Tally], theirs: Sequence[Tally]) -> Estimate | None:
    """By how much tau exceeds the other method's on the same texts, as a share of it. None without a cycle."""
    return estimate(np.concatenate((by_conversation(ours), by_conversation(theirs)), 1), gain_of)


def tau_of(sums_K: np.ndarray) -> Any:
    """Of tokens and cycles; of many sums at once, [K, S], too."""
    return sums_K[0] / sums_K[1]


def gain_of(sums_K: np.ndarray) -> Any:
    """Of our tokens and cycles, then theirs."""
    return tau_of(sums_K) / tau_of(sums_K[2:]) - 1


def by_conversation(tallies: Sequence[Tally]) -> np.ndarray:
    """float64 [C, 2]: tokens and cycles of each conversation, all turns together."""
    units: dict[int | str, list[int]] = {}
    for i, t in enumerate(tallies):
        unit = units.setdefault(i if t.conversation is None else t.conversation, [0, 0])
        unit[0] += t.num_emitted
        unit[1] += t.num_cycles
    return np.array(list(units.values()), dtype=np.float64).reshape(-1, 2)


def estimate(sums_CK: np.ndarray, statistic: Callable[[np.ndarray], Any]) -> Estimate | None:
    """A statistic of sums over conversations (of all methods' tokens and cycles, in turns) and its 95 % interval.

    Percentile bootstrap: conversations are drawn, each with all that the methods did in it.
    """
    whole_K = sums_CK.sum(0)
    if not whole_K[1]:
        return None
    with np.errstate(invalid="ignore"):  # a resample of texts without a cycle
        values_S = statistic((draws(len(sums_CK)) @ sums_CK).T)
    low, high = np.nanpercentile(values_S, [2.5, 97.5])
    return float(statistic(whole_K)), float(low), float(high)


@lru_cache(maxsize=2)  # of all texts, and of those that do not loop: the same for every method
def draws(count: int) -> np.ndarray:
    """float64 [S, count]: how often each of ``count`` is drawn in each of 10,000 resamples."""
    picks_SC = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    flat = picks_SC + count * np.arange(RESAMPLES)[:, None]
    return np.bincount(flat.ravel(), minlength=count * RESAMPLES).reshape(RESAMPLES, count).astype(np.float64)


def measure(ours: Sequence[Tally], baseline: Sequence[Tally] | None) -> dict[str, Any]:
    """The measured part of an eval row. ``baseline``: the tallies of the method that gains are counted over."""
    drafted, accepted = (
        [sum(getattr(t, name)[level] for t in ours) for level in range(LEVELS)] for name in ("drafted", "accepted")
    )
    per_prompt = [t.num_emitted / t.num_cycles for t in ours if t.num_cycles]
    flowing = [i for i, t in enumerate(ours) if not t.looping]
    ours_flowing, baseline_flowing = [ours[i] for i in flowing], baseline and [baseline[i] for i in flowing]
    return {
        "num_prompts": len(ours),
        "num_cycles": sum(t.num_cycles for t in ours),
        **named("acceptance_length", tau_with_interval(ours)),
        **named("acceptance_length_nonlooping", tau_with_interval(ours_flowing)),
        "acceptance_length_mean": mean(per_prompt) if per_prompt else None,
        "looping": mean(t.looping for t in ours),
        "acceptance_by_depth": by_depth(ours),
        "acceptance_by_level": [a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        "refined_drafted": drafted[1] / max(sum(drafted), 1),
        "refined_accepted": accepted[1] / max(sum(accepted), 1),
        "repeated_siblings": sum(t.repeated for t in ours) / max(sum(drafted), 1),
        **named("gain", paired_gain(ours, baseline) if baseline else None),
        **named("gain_nonlooping", paired_gain(ours_flowing, baseline_flowing) if baseline_flowing else None),
    }


def named(name: str, found: Estimate | None) -> dict[str, float | None]:
    """An estimate as fields of a row: ``name``, ``name_low``, ``name_high``."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), found or (None, None, None), strict=True))
