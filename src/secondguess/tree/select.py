"""Which candidates come first: to be grown, to be reconsidered, to be verified.

R requests, C candidates, F nodes grown in a step, M nodes reconsidered, N nodes of the final tree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.tree.candidates import Candidates, Picks, depth_of, parent_of, token_of
from secondguess.types import DraftTree


def order_by(primary_RC: Tensor, *ties_RC: Tensor) -> Tensor:
    """Indices that sort ``primary_RC`` ascending, equal entries by each of ``ties_RC`` in turn."""
    *others, last = (primary_RC, *ties_RC)
    order_RC = last.argsort(dim=1)
    for key_RC in reversed(others):
        order_RC = order_RC.gather(1, key_RC.gather(1, order_RC).argsort(dim=1, stable=True))
    return order_RC


def best_fresh(pool: Candidates, count: int) -> Picks:
    """The ``count`` best fresh candidates: score descending, then depth, parent index, token id."""
    scores_RC = torch.where(pool.fresh_RC, pool.scores_RC, -torch.inf)
    nodes_RF = order_by(-scores_RC, pool.keys_RC)[:, :count]
    return Picks(nodes_RF, pool.holders_RC.gather(1, nodes_RF), pool.fresh_RC.gather(1, nodes_RF))


def least_confident(pool: Candidates, prev: Picks, confidence_RX: Tensor, count: int) -> Picks:
    """The ``count`` valid nodes of ``prev`` with the lowest confidence, equal ones in the order of ``best_fresh``.

    ``confidence_RX`` comes from the forward of ``prev``, whose first rows they were.
    """
    if count == 0:
        return prev.take(prev.nodes_RX[:, :0])
    confidence_RF = confidence_RX[:, : prev.nodes_RX.shape[1]].masked_fill(~prev.valid_RX, torch.inf)
    scores_RF, keys_RF = pool.scores_RC.gather(1, prev.nodes_RX), pool.keys_RC.gather(1, prev.nodes_RX)
    chosen_RM = order_by(confidence_RF, -scores_RF, keys_RF)[:, :count]
    return prev.take(chosen_RM)


def cut(pool: Candidates, level1_RY: Tensor, budget: int) -> DraftTree:
    """The root and the ``budget`` best candidates, in the order in which they were created.

    Adding the best candidate whose parent is already in takes them in sorted order: a path score is never above the
    parent's, and of two equal scores the shallower node comes first.
    """
    num_candidates = pool.keys_RC.shape[1]
    best_RN = order_by(-pool.scores_RC, pool.keys_RC)[:, : 1 + budget]
    offered_RN = pool.scores_RC.gather(1, best_RN) > -torch.inf
    index_RN = torch.where(offered_RN, best_RN, num_candidates).sort(dim=1).values
    index_RN = pad(index_RN, (0, 1 + budget - index_RN.shape[1]), value=num_candidates)
    valid_RN = index_RN < num_candidates
    safe_RN = index_RN.clamp(max=num_candidates - 1)
    keys_RN = pool.keys_RC.gather(1, safe_RN) * valid_RN
    return DraftTree(
        tokens_RN=token_of(keys_RN),
        parents_RN=torch.where(depth_of(keys_RN) > 0, torch.searchsorted(index_RN, parent_of(keys_RN)), -1),
        depths_RN=depth_of(keys_RN),
        levels_RN=(level1_RY.gather(1, pool.holders_RC.gather(1, safe_RN)) & valid_RN).long(),
        scores_RN=torch.where(valid_RN, pool.scores_RC.gather(1, safe_RN), -torch.inf),
        valid_RN=valid_RN,
    )
