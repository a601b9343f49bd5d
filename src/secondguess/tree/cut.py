"""The tree that goes to verification. R requests, C candidates, N nodes of the final tree, Y rows of the round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.device import upload
from secondguess.tree.candidates import Candidates, depth_of, parent_of, token_of
from secondguess.tree.select import order_by
from secondguess.types import DraftTree


def cut(pool: Candidates, level1_RY: Tensor, budgets: Sequence[int], falling: bool) -> DraftTree:
    """The root, then as often as ``budgets`` gives a request the best candidate whose parent is in.

    Nodes are in the order in which they were created; trees are padded to the largest budget.
    ``falling``: no score is above its parent's (a log-prob is never above 0). Then the best candidates are such a tree
    already: of two equal scores the shallower node comes first.
    """
    num_candidates, num_nodes = pool.keys_RC.shape[1], 1 + max(budgets)
    if len(set(budgets)) == 1:
        budget_R1 = torch.full_like(pool.keys_RC[:, :1], budgets[0])
    else:
        budget_R1 = upload(budgets, pool.keys_RC.device)[:, None]
    index_RN = (best_of_all if falling else best_by_turns)(pool, budget_R1, num_nodes)
    index_RN = index_RN.sort(dim=1).values[:, :num_nodes]
    index_RN = pad(index_RN, (0, num_nodes - index_RN.shape[1]), value=num_candidates)
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


def best_of_all(pool: Candidates, budget_R1: Tensor, num_nodes: int) -> Tensor:
    """Indices of the 1 + budget best candidates, of at most ``num_nodes``; past the last candidate for the rest."""
    best_RN = order_by(-pool.scores_RC, pool.keys_RC)[:, :num_nodes]
    within_RN = torch.arange(best_RN.shape[1], device=best_RN.device) <= budget_R1
    in_RN = within_RN & (pool.scores_RC.gather(1, best_RN) > -torch.inf)
    return torch.where(in_RN, best_RN, pool.keys_RC.shape[1])


def best_by_turns(pool: Candidates, budget_R1: Tensor, num_nodes: int) -> Tensor:
    """[R, C]: the indices of the candidates that come in, one a turn; past the last candidate for the rest."""
    index_C = torch.arange(pool.keys_RC.shape[1], device=pool.keys_RC.device)
    parents_RC, offered_RC = parent_of(pool.keys_RC), pool.scores_RC > -torch.inf
    rank_RC = order_by(-pool.scores_RC, pool.keys_RC).argsort(dim=1)
    in_RC = (index_C == 0).expand_as(offered_RC)
    for turn in range(1, num_nodes):
        open_RC = offered_RC & in_RC.gather(1, parents_RC) & ~in_RC
        rank_if_open_RC = torch.where(open_RC, rank_RC, len(index_C))
        next_RC = open_RC & (rank_RC == rank_if_open_RC.amin(1, keepdim=True))
        in_RC = in_RC | (next_RC & (turn <= budget_R1))
    return torch.where(in_RC, index_C, len(index_C))
