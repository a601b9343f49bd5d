"""Trees of single requests taken out of a batch, made smaller, and put side by side.

R requests, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.types import DraftTree

# What stands in the place of nodes that a tree does not have.
PADDING = {
    "tokens_RN": 0,
    "parents_RN": -1,
    "depths_RN": 0,
    "levels_RN": 0,
    "scores_RN": -torch.inf,
    "valid_RN": False,
}


def row_of(tree: DraftTree, r: int) -> DraftTree:
    """The tree of request ``r`` alone."""
    return DraftTree(*(getattr(tree, name)[r : r + 1] for name in PADDING))


def trim(tree: DraftTree, r: int, budget: int) -> DraftTree:
    """The tree of request ``r`` alone, as it would have been drafted with this budget.

    That is its best nodes, because a draft adds one node after the other, the best one whose parent is in.
    """
    return of_nodes(tree, r, torch.tensor(best_nodes(tree, r, budget), device=tree.tokens_RN.device))


def of_nodes(tree: DraftTree, r: int, kept_N: Tensor) -> DraftTree:
    """The tree of request ``r`` alone, of the nodes ``kept_N`` (int64, ascending), whose parents are among them."""
    small = DraftTree(*(getattr(tree, name)[r : r + 1, kept_N] for name in PADDING))
    parents_RN = torch.searchsorted(kept_N, small.parents_RN)
    return DraftTree(
        small.tokens_RN,
        torch.where(small.parents_RN >= 0, parents_RN, -1),
        small.depths_RN,
        small.levels_RN,
        small.scores_RN,
        small.valid_RN,
    )


def no_deeper(tree: DraftTree, rooms: Sequence[int]) -> DraftTree:
    """The trees without the nodes of request ``r`` that are deeper than ``rooms[r]``."""
    if min(rooms) >= tree.tokens_RN.shape[1] - 1:  # a tree is never deeper than it has nodes
        return tree
    fits_RN = tree.valid_RN & (tree.depths_RN <= torch.tensor(rooms, device=tree.depths_RN.device)[:, None])
    parts = [of_nodes(tree, r, fits_N.nonzero()[:, 0]) for r, fits_N in enumerate(fits_RN)]
    return side_by_side(parts, range(len(parts)))


def best_nodes(tree: DraftTree, r: int, budget: int) -> list[int]:
    """The root, then ``budget`` times the best node whose parent is in; in ascending order."""
    scores, depths, tokens = (x_RN[r].tolist() for x_RN in (tree.scores_RN, tree.depths_RN, tree.tokens_RN))
    children: dict[int, list[int]] = {}
    for node, (parent, valid) in enumerate(zip(tree.parents_RN[r].tolist(), tree.valid_RN[r].tolist(), strict=True)):
        if valid:
            children.setdefault(parent, []).append(node)
    waiting, kept = [(0.0, 0, 0, 0, 0)], []
    while waiting and len(kept) <= budget:
        node = heappop(waiting)[-1]
        kept.append(node)
        for child in children.get(node, ()):
            heappush(waiting, (-scores[child], depths[child], node, tokens[child], child))
    return sorted(kept)


def side_by_side(trees: Sequence[DraftTree], order: Sequence[int]) -> DraftTree:
    """One batch of the rows of all ``trees``, the i-th of which becomes row ``order[i]``."""
    size = max(tree.tokens_RN.shape[1] for tree in trees)
    back_R = torch.tensor(order, device=trees[0].tokens_RN.device).argsort()

    def column(name: str) -> Tensor:
        parts = (getattr(tree, name) for tree in trees)
        return torch.cat([pad(x_RN, (0, size - x_RN.shape[1]), value=PADDING[name]) for x_RN in parts])[back_R]

    return DraftTree(*(column(name) for name in PADDING))
