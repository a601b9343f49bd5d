"""The order of candidates, and which of them are grown. (``hesitate`` says which are reconsidered, ``cut`` verified.)

R requests, C candidates, P nodes forwarded one step ago, K children offered, F nodes grown in a step, A of them extra.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.tree.candidates import Candidates, Picks, children_of, marked


def order_by(primary_RC: Tensor, *ties_RC: Tensor) -> Tensor:
    """Indices that sort ``primary_RC`` ascending, equal entries by each of ``ties_RC`` in turn."""
    *others, last = (primary_RC, *ties_RC)
    order_RC = last.argsort(dim=1, stable=True)
    for key_RC in reversed(others):
        order_RC = order_RC.gather(1, key_RC.gather(1, order_RC).argsort(dim=1, stable=True))
    return order_RC


def best_fresh(pool: Candidates, count: int) -> Picks:
    """The ``count`` best fresh candidates: score descending, then depth, parent index, token id.

    The parent of a fresh candidate has been forwarded, whatever their scores are.
    """
    scores_RC = torch.where(pool.fresh_RC, pool.scores_RC, -torch.inf)
    nodes_RF = order_by(-scores_RC, pool.keys_RC)[:, :count]
    return Picks(nodes_RF, pool.holders_RC.gather(1, nodes_RF), pool.fresh_RC.gather(1, nodes_RF))


def best_children(pool: Candidates, parents: Picks, grown: Picks, num_offers: int) -> Picks:
    """Of each of ``parents`` [R, P] the best fresh child that is not among ``grown``; not valid where there is none."""
    free_RC = pool.fresh_RC & ~marked(grown, pool.keys_RC.shape[1])
    children_RPK = children_of(parents, num_offers)
    at, families = children_RPK.flatten(1), (-1, num_offers)
    scores = torch.where(free_RC, pool.scores_RC, -torch.inf).gather(1, at)
    keys = pool.keys_RC.gather(1, at)
    first = order_by(-scores.view(families), keys.view(families))[:, 0].view(parents.nodes_RX.shape)
    nodes_RP = children_RPK.gather(2, first[..., None])[..., 0]
    valid_RP = parents.valid_RX & free_RC.gather(1, nodes_RP)
    return Picks(nodes_RP, pool.holders_RC.gather(1, nodes_RP), valid_RP)
