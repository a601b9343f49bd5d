"""What a draft is worth: expected tokens, less what its seconds would bring elsewhere.

Tokens per second over many cycles are most if every cycle makes the most of tokens - pace * seconds, where the pace is
the tokens per second that the rule itself attains (Dinkelbach, Management Science 13(7), 1967). So a node is verified
if its acceptance probability exceeds pace * its seconds, in hard cycles as in easy ones; the most tokens per second of
each cycle by itself would spend too much on the hard ones.

R requests, C candidates, F candidates grown next, K offered children, N nodes of a tree (0 to the most), B score bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from secondguess.engine.calibration import probability
from secondguess.tree.candidates import Candidates


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that a batch of one size pays."""

    after_N: np.ndarray  # for all that follows a draft, with trees of so many nodes, the roots not counted
    start: float  # for a draft without steps
    step: float
    step_looking: float  # for a step with second looks

    @property
    def plain(self) -> float:
        """A plain cycle."""
        return float(self.after_N[0])


@dataclass(slots=True)
class Worth:
    """The guide of one draft. All trees get one size: padded to the largest, smaller ones would save nothing."""

    after_N: np.ndarray
    step: float  # seconds
    pace: float  # tokens per second
    offsets_RB: np.ndarray  # of the requests' calibrations
    child_probs_K: np.ndarray  # of what a node offers on average
    grow_width: int
    num_steps: int = 0  # taken
    num_nodes: int = 0  # of each tree
    root_probs_K: np.ndarray | None = None  # of what the roots have offered, on average

    def goes_on(self, pool: Candidates) -> bool:
        """Whether one step more is worth its seconds, if the next nodes offer what nodes offer on average."""
        scores_RC = host(pool.scores_RC)
        if self.num_steps == 0:
            self.root_probs_K = np.exp(host(pool.logps_RC)[:, 1:]).mean(0)
        fresh_RC = np.where(host(pool.fresh_RC), scores_RC, -np.inf)
        frontier_RF = descending(fresh_RC)[:, : self.grow_width]
        children_RC = (frontier_RF[..., None] + np.log(np.maximum(self.child_probs_K, 1e-9))).reshape(
            len(scores_RC), -1
        )
        gain = self.values(np.concatenate((scores_RC, children_RC), 1)).max() - self.values(scores_RC).max()
        more = bool(gain > self.pace * self.step)
        self.num_steps += more
        return more

    def budgets(self, pool: Candidates) -> list[int]:
        self.num_nodes = int(self.values(host(pool.scores_RC)).argmax())
        return [self.num_nodes] * len(pool.scores_RC)

    def values(self, scores_RC: np.ndarray) -> np.ndarray:
        """[N]: expected accepted tokens of all trees with so many nodes each, less their price in tokens.

        The best nodes of a tree have the largest path scores, and a node is accepted with its path's probability.
        """
        rows = zip(scores_RC[:, 1:], self.offsets_RB, strict=True)  # without the roots
        probs_RC = np.stack([probability(scores_C, offsets_B) for scores_C, offsets_B in rows])
        best_N = descending(probs_RC).sum(0)[: len(self.after_N) - 1]
        expected_N = np.zeros(len(self.after_N))
        expected_N[1 : len(best_N) + 1] = best_N.cumsum()
        expected_N[len(best_N) + 1 :] = best_N.sum()
        return expected_N - self.pace * self.after_N


def descending(x_RC: np.ndarray) -> np.ndarray:
    return -np.sort(-x_RC, 1)


def host(x: Tensor) -> np.ndarray:
    return x.cpu().numpy()
