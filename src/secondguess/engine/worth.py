"""What a draft is worth: expected tokens, less what its seconds would bring elsewhere.

Tokens per second over many cycles are most if every cycle makes the most of tokens - pace * seconds, where the pace is
the tokens per second that the rule itself attains (Dinkelbach, Management Science 13(7), 1967). So a node is verified
if its acceptance probability exceeds pace * its seconds, in hard cycles as in easy ones; the most tokens per second of
each cycle by itself would spend too much on the hard ones.

R requests, C candidates, F candidates grown next, K offered children, N nodes of a tree (0 to the most), B score bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    context: float  # tokens of a request on average
    further_N: np.ndarray  # what one more of them adds to ``after_N``

    def after(self, context: float) -> Prices:
        """After so many tokens, if they are more."""
        more = max(context - self.context, 0.0)
        return replace(self, after_N=self.after_N + more * self.further_N, context=self.context + more)

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
    offsets: Sequence[tuple[np.ndarray, np.ndarray]]  # of each calibration: whose it is, bool [R], and its offsets [B]
    child_probs_K: np.ndarray  # of what a node offers on average
    grow_width: int
    num_steps: int = 0  # taken
    num_nodes: int = 0  # of each tree
    root_probs_K: np.ndarray | None = None  # of what the roots have offered, on average

    def goes_on(self, pool: Candidates) -> bool:
        """Whether one step more is worth its seconds, if the next nodes offer what nodes offer on average."""
        scores_RC = host(pool.scores_RC)
        if self.root_probs_K is None:
            self.root_probs_K = np.exp(host(pool.logps_RC)[:, 1:]).mean(0)
        fresh_RC = np.where(host(pool.fresh_RC), scores_RC, -np.inf)
        frontier_RF1 = largest(fresh_RC, self.grow_width)[..., None]
        children_RC = (frontier_RF1 + np.log(np.maximum(self.child_probs_K, 1e-9))).reshape(len(scores_RC), -1)
        now_RN = self.best(scores_RC)
        then_RN = largest(np.concatenate((now_RN, children_RC), 1), self.most)
        more = bool(self.values(then_RN).max() - self.values(now_RN).max() > self.pace * self.step)
        self.num_steps += more
        return more

    def budgets(self, pool: Candidates) -> list[int]:
        self.num_nodes = int(self.values(self.best(host(pool.scores_RC))).argmax())
        return [self.num_nodes] * len(pool.scores_RC)

    @property
    def most(self) -> int:
        """Nodes that a tree may have."""
        return len(self.after_N) - 1

    def best(self, scores_RC: np.ndarray) -> np.ndarray:
        """The path scores of the best nodes, as many as a tree may have."""
        return largest(scores_RC[:, 1:], self.most)  # without the roots

    def values(self, best_RN: np.ndarray) -> np.ndarray:
        """Expected accepted tokens of all trees with 0, 1, ... of the best nodes each, less their price in tokens.

        The best nodes of a tree have the largest path scores, and a node is accepted with its path's probability.
        """
        values = -self.pace * self.after_N[: 1 + best_RN.shape[1]]
        each = (probability(best_RN[is_R], offsets_B).sum(0) for is_R, offsets_B in self.offsets)
        values[1:] += sum(each, np.zeros(best_RN.shape[1])).cumsum()
        return values


def largest(x_RC: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` largest of each row, or all there are, in descending order."""
    if count < x_RC.shape[1]:
        x_RC = np.partition(x_RC, -count, 1)[:, -count:]
    return np.sort(x_RC, 1)[:, ::-1]


def host(x: Tensor) -> np.ndarray:
    return x.cpu().numpy()
