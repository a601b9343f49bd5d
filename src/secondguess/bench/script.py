"""Acceptance by a stated law: random drafters guess nothing right, so a script says how many guesses are accepted.

R requests, N nodes of a tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from secondguess.device import upload
from secondguess.types import DraftTree

ChooseAt = Callable[[Tensor, Tensor], Tensor]
GOLDEN = 0.6180339887498949  # its multiples are spread evenly over [0, 1), whatever their number


def histogram(tau: float, most: int) -> list[float]:
    """Shares of cycles that accept 0, 1, ..., ``most`` draft tokens: a geometric law, cut off, with mean tau - 1."""
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(geometric(middle, most)) < tau - 1 else (low, middle)
    return geometric(low, most)


def geometric(ratio: float, most: int) -> list[float]:
    weights = [ratio**n for n in range(most + 1)]
    return [weight / sum(weights) for weight in weights]


def mean(shares: Sequence[float]) -> float:
    return sum(n * share for n, share in enumerate(shares))


class Script:
    """See ``Engine.script``. The target chooses all the same, at its cost; then the best child, or none, is taken.

    A cycle accepts less than it should where the tree ends before.
    """

    def __init__(self, shares: Sequence[float], no_draft_token: int) -> None:
        """``no_draft_token``: one that no drafter offers, so that a path ends there."""
        self.steps = list(itertools.accumulate(shares))
        self.no_draft_token, self.drawn = no_draft_token, 0

    def draw(self) -> int:
        self.drawn += 1
        place = self.drawn * GOLDEN % 1.0
        return next((n for n, step in enumerate(self.steps) if place < step), len(self.steps) - 1)

    def __call__(self, tree: DraftTree, choose_at: ChooseAt) -> ChooseAt:
        wanted_R = upload([self.draw() for _ in range(len(tree.tokens_RN))], tree.tokens_RN.device)
        depths = itertools.count()

        def scripted(node_R: Tensor, active_R: Tensor) -> Tensor:
            choose_at(node_R, active_R)
            found_R, child_R = (tree.parents_RN == node_R[:, None]).max(1)  # children come best first
            goes_on_R = found_R & (next(depths) < wanted_R)
            return torch.where(goes_on_R, tree.tokens_RN.gather(1, child_R[:, None])[:, 0], self.no_draft_token)

        return scripted
