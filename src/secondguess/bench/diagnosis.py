"""Where a drafter fails and what a second look at it recovers: Figure 1 and Table 7 of arXiv 2611.05724, and more.

Pure functions over what ``observe`` collected. P positions of greedy chains, N drafted nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import sqrt
from typing import Any

import numpy as np

Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations
NUM_BINS = 10
BIN_EDGES = np.arange(1, NUM_BINS) / NUM_BINS
# Table 7's buckets of confidence.
BUCKETS = ("< 0.5", "0.5-0.9", ">= 0.9")
BUCKET_EDGES = (0.5, 0.9)
ALL = "all"


@dataclass(frozen=True, slots=True)
class Positions:
    """Tokens that greedy chains reached: all that were accepted, and the first rejected one of each chain."""

    confidence0_P: np.ndarray  # the drafter's top-1 probability at level 0
    confidence1_P: np.ndarray  # and at level 1
    target_confidence_P: np.ndarray  # the target's
    right0_P: np.ndarray  # bool: level 0's top-1 is the target's token, so the chain goes on
    right1_P: np.ndarray  # bool: level 1's top-1 is
    known_P: np.ndarray  # bool: the target's token is in the draft vocabulary


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes of all draft trees, roots left out."""

    probability_N: np.ndarray  # exp of the path score
    on_path_N: np.ndarray  # bool: the target's text goes through the node
    depth_N: np.ndarray
    level_N: np.ndarray


@dataclass(frozen=True, slots=True)
class Share:
    """``hits`` of ``count``, and the 95 % Wilson interval; None of nothing.

    The interval takes hits for independent. Those of one text are not quite, so it is somewhat too narrow.
    """

    hits: int
    count: int
    share: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Bin:
    """Probabilities from ``low`` to ``high``: their mean, and how often what they predict came true."""

    low: float
    high: float
    mean: float | None
    true: Share


@dataclass(frozen=True, slots=True)
class Cell:
    """A bucket of Table 7. Changes are means of level 1's top-1 probability less level 0's."""

    drafter: str
    target: str
    pool: Share  # of all rejected tokens
    recovered: Share  # of the bucket's: level 1's top-1 is the target's token
    change_recovered: float | None
    change_unrecovered: float | None


@dataclass(frozen=True, slots=True)
class Depth:
    """Accepted draft tokens at one depth of the tree, by the level that offered them."""

    depth: int
    refined: Share


def share_of(hit: np.ndarray) -> Share:
    """``hit``: bool, an entry per trial. Interval: Wilson (1927)."""
    return wilson(int(hit.sum()), len(hit))


def wilson(hits: int, count: int) -> Share:
    if not count:
        return Share(0, 0, None, None, None)
    p, z2 = hits / count, Z**2 / count
    centre = (p + z2 / 2) / (1 + z2)
    half = Z * sqrt(p * (1 - p) / count + z2 / (4 * count)) / (1 + z2)
    # Rounding must not push a share of 0 or 1 out of its interval.
    return Share(hits, count, p, max(min(centre - half, p), 0.0), min(max(centre + half, p), 1.0))


def bins(probability: np.ndarray, true: np.ndarray) -> list[Bin]:
    """Ten bins of equal width."""
    at = np.digitize(probability, BIN_EDGES)
    return [
        Bin(b / NUM_BINS, (b + 1) / NUM_BINS, mean(probability[at == b]), share_of(true[at == b]))
        for b in range(NUM_BINS)
    ]


def figure1a(p: Positions) -> list[Bin]:
    """Acceptance against the drafter's confidence."""
    return bins(p.confidence0_P, p.right0_P)


def figure1b(p: Positions) -> np.ndarray:
    """int64 [10, 10]: rejected tokens by the drafter's confidence (row) and the target's (column), in equal bins."""
    at_P = NUM_BINS * np.digitize(p.confidence0_P, BIN_EDGES) + np.digitize(p.target_confidence_P, BIN_EDGES)
    return np.bincount(at_P[~p.right0_P], minlength=NUM_BINS**2).reshape(NUM_BINS, NUM_BINS)


def table7(p: Positions) -> list[Cell]:
    """Rejected tokens by the drafter's confidence and the target's, row by row, with totals."""
    drafter, target = in_buckets(p.confidence0_P), in_buckets(p.target_confidence_P)
    return [cell(p, a, b, drafter[a] & target[b]) for a, b in product(drafter, target)]


def cell(p: Positions, drafter: str, target: str, in_bucket_P: np.ndarray) -> Cell:
    rejected_P = ~p.right0_P
    part_P = rejected_P & in_bucket_P
    change_P = p.confidence1_P - p.confidence0_P
    return Cell(
        drafter,
        target,
        share_of(in_bucket_P[rejected_P]),
        share_of(p.right1_P[part_P]),
        mean(change_P[part_P & p.right1_P]),
        mean(change_P[part_P & ~p.right1_P]),
    )


def broken(p: Positions) -> dict[str, Share]:
    """Of the positions where level 0 is right, the share where level 1 is not, by the drafter's confidence."""
    return {
        name: share_of(~p.right1_P[p.right0_P & in_bucket_P])
        for name, in_bucket_P in in_buckets(p.confidence0_P).items()
    }


def unknown(p: Positions) -> Share:
    """Of the rejected tokens, those outside the draft vocabulary: no look can recover them."""
    return share_of(~p.known_P[~p.right0_P])


def depths(n: Nodes) -> list[Depth]:
    """Where refined tokens sit in accepted paths."""
    level_A, depth_A = n.level_N[n.on_path_N], n.depth_N[n.on_path_N]
    return [Depth(d, share_of(level_A[depth_A == d] == 1)) for d in range(1, int(depth_A.max(initial=0)) + 1)]


def calibration(n: Nodes) -> dict[str, list[Bin]]:
    """Path probabilities against the share of nodes that the text goes through: of all nodes, and of refined ones."""
    refined_N = n.level_N == 1
    refined = bins(n.probability_N[refined_N], n.on_path_N[refined_N])
    return {ALL: bins(n.probability_N, n.on_path_N), "refined": refined}


def in_buckets(confidence_P: np.ndarray) -> dict[str, np.ndarray]:
    """Which positions lie in each of Table 7's buckets, and in all of them."""
    at_P = np.digitize(confidence_P, BUCKET_EDGES)
    return {name: at_P == b for b, name in enumerate(BUCKETS)} | {ALL: at_P >= 0}


def mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that ``secondguess diagnose`` shows."""

    figure1a: list[Bin]
    figure1b: list[list[int]]  # see the function
    table7: list[Cell]
    broken: dict[str, Share]
    unknown: Share
    depths: list[Depth]
    duplicates: Share  # refined offers that repeat a level-0 child of their node
    raised: Share  # of these, the ones that find it more probable than level 0 did
    calibration: dict[str, list[Bin]]

    @property
    def rejected(self) -> int:
        """Tokens in the reject pool."""
        return self.unknown.count


def diagnose(positions: Positions, nodes: Nodes, refined: Mapping[str, int]) -> Diagnosis:
    """``refined``: see ``offers.count_refined``."""
    return Diagnosis(
        figure1a=figure1a(positions),
        figure1b=figure1b(positions).tolist(),
        table7=table7(positions),
        broken=broken(positions),
        unknown=unknown(positions),
        depths=depths(nodes),
        duplicates=wilson(refined["duplicate"], refined["offered"]),
        raised=wilson(refined["raised"], refined["duplicate"]),
        calibration=calibration(nodes),
    )


def results(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """For JSON: one entry per figure, table or number."""
    return [{"name": name, "value": value} for name, value in asdict(diagnosis).items()]
