"""What replayed cycles drafted and accepted, counted per text, and the rows that ``eval`` shows. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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


def paired_gain(ours: Sequence[Tally], theirs: Sequence[Tally], seed: int = 0) -> tuple[float, float, float] | None:
    """By how much tau exceeds the other method's on the same texts, as a share of it, and the 95 % interval of that.

    Percentile bootstrap over texts (10,000 resamples; both methods' cycles of a text stay together, and the turns of a
    conversation).
    """
    units: dict[int | str, list[int]] = {}
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        unit = units.setdefault(i if mine.conversation is None else mine.conversation, [0] * 4)
        for j, n in enumerate((mine.num_emitted, mine.num_cycles, other.num_emitted, other.num_cycles)):
            unit[j] += n
    table_4P = np.array(list(units.values()), dtype=np.float64).reshape(-1, 4).T
    if not table_4P[1].sum():
        return None
    picks_SP = np.random.default_rng(seed).integers(table_4P.shape[1], size=(RESAMPLES, table_4P.shape[1]))
    emitted_S, cycles_S, their_emitted_S, their_cycles_S = table_4P[:, picks_SP].sum(-1)
    whole = table_4P.sum(-1)
    with np.errstate(invalid="ignore"):  # a resample of texts without a cycle
        gains_S = (emitted_S / cycles_S) / (their_emitted_S / their_cycles_S) - 1
    low, high = np.nanpercentile(gains_S, [2.5, 97.5])
    return float(whole[0] / whole[1] / (whole[2] / whole[3]) - 1), float(low), float(high)


def measure(ours: Sequence[Tally], baseline: Sequence[Tally] | None) -> dict[str, Any]:
    """The measured part of an eval row. ``baseline``: the tallies of the method that gains are counted over."""
    drafted, accepted = (
        [sum(getattr(t, name)[level] for t in ours) for level in range(LEVELS)] for name in ("drafted", "accepted")
    )
    per_prompt = [t.num_emitted / t.num_cycles for t in ours if t.num_cycles]
    flowing = [i for i, t in enumerate(ours) if not t.looping]
    return {
        "num_prompts": len(ours),
        "num_cycles": sum(t.num_cycles for t in ours),
        "acceptance_length": acceptance_length(ours),
        "acceptance_length_nonlooping": acceptance_length([ours[i] for i in flowing]),
        "acceptance_length_mean": mean(per_prompt) if per_prompt else None,
        "looping": mean(t.looping for t in ours),
        "acceptance_by_depth": by_depth(ours),
        "acceptance_by_level": [a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        "refined_drafted": drafted[1] / max(sum(drafted), 1),
        "refined_accepted": accepted[1] / max(sum(accepted), 1),
        "repeated_siblings": sum(t.repeated for t in ours) / max(sum(drafted), 1),
        **gain("gain", ours, baseline),
        **gain("gain_nonlooping", [ours[i] for i in flowing], baseline and [baseline[i] for i in flowing]),
    }


def gain(name: str, ours: Sequence[Tally], baseline: Sequence[Tally] | None) -> dict[str, float | None]:
    found = paired_gain(ours, baseline) if baseline is not None else None
    return dict(zip((name, f"{name}_low", f"{name}_high"), found or (None, None, None), strict=True))
