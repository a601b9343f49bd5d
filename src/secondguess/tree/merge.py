"""Second offers under the same parent, joined with the first by token, so that siblings stay distinct.

R requests, C candidates, M reconsidered nodes, K offered children (I of level 1, J of level 0 where both appear).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from secondguess.tree.candidates import Candidates, Picks, children_of, token_of

# Level 0's log-probs of its children and level 1's of the same tokens (-inf: it offers no such token) -> the log-probs
# that the edges have from now on, and which of them level 1 won (bool).
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def keep_larger(logps_RMK: Tensor, rivals_RMK: Tensor) -> tuple[Tensor, Tensor]:
    """Level 0 keeps the edge where both are equal."""
    return torch.maximum(logps_RMK, rivals_RMK), rivals_RMK > logps_RMK


def take_second(logps_RMK: Tensor, rivals_RMK: Tensor) -> tuple[Tensor, Tensor]:
    offered_RMK = rivals_RMK > -torch.inf
    return torch.where(offered_RMK, rivals_RMK, logps_RMK), offered_RMK


def take_mean(logps_RMK: Tensor, rivals_RMK: Tensor) -> tuple[Tensor, Tensor]:
    """Level 1 wins what it raises."""
    means_RMK = (logps_RMK + rivals_RMK) / 2
    return torch.where(rivals_RMK > -torch.inf, means_RMK, logps_RMK), rivals_RMK > logps_RMK


def keep_first(logps_RMK: Tensor, rivals_RMK: Tensor) -> tuple[Tensor, Tensor]:
    return logps_RMK, torch.zeros_like(rivals_RMK, dtype=torch.bool)


RULES: dict[str, Rule] = {
    "max": keep_larger,
    "replace": take_second,
    "rescore_all": take_second,
    "logmean": take_mean,
    "drop": keep_first,
    "novel_only": keep_first,
    "union": keep_larger,
    "append": keep_first,
}


def refine(
    pool: Candidates,
    hesitant: Picks,
    tokens_RMK: Tensor,
    logps_RMK: Tensor,
    rows_M: Tensor,
    merge: str = "max",
    known_logps_RMK: Tensor | None = None,
) -> tuple[Candidates, Tensor]:
    """Merge what the level-1 rows numbered ``rows_M`` offer into the level-0 children of the ``hesitant`` nodes.

    ``known_logps_RMK`` are level 1's log-probs of these children, whether it offers them or not.
    Returns the candidates, of which only won children stay fresh (those not forwarded yet), and the log-probs of the
    novel offers (-inf for the rest). Of the path scores, only those of the children whose edge changed are renewed.
    """
    if len(rows_M) == 0:
        return replace(pool, fresh_RC=torch.zeros_like(pool.fresh_RC)), logps_RMK
    children_RMK = children_of(hesitant, tokens_RMK.shape[2])
    at, shape = children_RMK.flatten(1), children_RMK.shape
    old_logps_RMK = pool.logps_RC.gather(1, at).view(shape)
    same_RMIJ = tokens_RMK[..., :, None] == token_of(pool.keys_RC.gather(1, at)).view(shape)[..., None, :]
    same_RMIJ &= (old_logps_RMK > -torch.inf)[..., None, :]
    rivals_RMK = torch.where(same_RMIJ, logps_RMK[..., :, None], -torch.inf).amax(-2)
    if known_logps_RMK is not None:
        there_RMK = hesitant.valid_RX[..., None] & (old_logps_RMK > -torch.inf)
        rivals_RMK = torch.where(there_RMK, known_logps_RMK, -torch.inf)
    edges_RMK, won_RMK = RULES[merge](old_logps_RMK, rivals_RMK)
    scores_RMK = pool.scores_RC.gather(1, hesitant.nodes_RX)[..., None] + edges_RMK
    refined = rewire(
        pool, at, edges_RMK.flatten(1), scores_RMK.flatten(1), won_RMK.flatten(1), rows_M.repeat_interleave(shape[2])
    )
    return refined, logps_RMK if merge == "append" else logps_RMK.masked_fill(same_RMIJ.any(-1), -torch.inf)


def rewire(pool: Candidates, at: Tensor, logps: Tensor, scores: Tensor, won: Tensor, rows: Tensor) -> Candidates:
    """Set the edges to candidates ``at`` [R, M K]; level 1's ``rows`` hold won ones, fresh unless forwarded."""
    changed = logps != pool.logps_RC.gather(1, at)
    scores = torch.where(changed, scores, pool.scores_RC.gather(1, at))
    holders = torch.where(won, rows, pool.holders_RC.gather(1, at))
    return replace(
        pool,
        logps_RC=pool.logps_RC.scatter(1, at, logps),
        scores_RC=pool.scores_RC.scatter(1, at, scores),
        holders_RC=pool.holders_RC.scatter(1, at, holders),
        fresh_RC=torch.zeros_like(pool.fresh_RC).scatter(1, at, won & ~pool.forwarded_RC.gather(1, at)),
    )
