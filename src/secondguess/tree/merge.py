"""Second offers under the same parent, joined with the first by token, so that siblings stay distinct.

R requests, C candidates, M reconsidered nodes, K offered children (I of level 1, J of level 0 where both appear).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondguess.tree.candidates import Candidates, Picks, token_of


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of the level-0 children and of the level-1 offers of M nodes."""

    logps_RMK: Tensor  # edges of the level-0 children
    won_RMK: Tensor  # bool: level-0 children whose edge is now of level 1
    novel_logps_RMK: Tensor  # edges of the level-1 offers, -inf where the token was already a child


def merge_max(tokens_RMK: Tensor, logps_RMK: Tensor, refined_tokens_RMK: Tensor, refined_logps_RMK: Tensor) -> Merged:
    """A token offered twice keeps the larger log-prob, and level 0 where they are equal."""
    same_RMIJ = refined_tokens_RMK[..., :, None] == tokens_RMK[..., None, :]
    same_RMIJ &= (logps_RMK > -torch.inf)[..., None, :]
    rival_RMK = torch.where(same_RMIJ, refined_logps_RMK[..., :, None], -torch.inf).amax(-2)
    novel_logps_RMK = refined_logps_RMK.masked_fill(same_RMIJ.any(-1), -torch.inf)
    return Merged(torch.maximum(logps_RMK, rival_RMK), rival_RMK > logps_RMK, novel_logps_RMK)


def refine(
    pool: Candidates, hesitant: Picks, tokens_RMK: Tensor, logps_RMK: Tensor, rows_M: Tensor
) -> tuple[Candidates, Tensor]:
    """Merge what the level-1 rows numbered ``rows_M`` offer into the level-0 children of the ``hesitant`` nodes.

    Returns the candidates, of which only won children stay fresh (if they were), and the log-probs of the novel offers.
    The offers of this step are not in yet, so these children have no children whose scores would have to follow.
    """
    if len(rows_M) == 0:
        return replace(pool, fresh_RC=torch.zeros_like(pool.fresh_RC)), logps_RMK
    num_offers = tokens_RMK.shape[2]
    first_RM1 = 1 + num_offers * hesitant.feature_rows_RX[..., None]
    children_RMK = first_RM1 + torch.arange(num_offers, device=first_RM1.device)
    at = children_RMK.flatten(1)
    old_tokens_RMK = token_of(pool.keys_RC.gather(1, at)).view_as(tokens_RMK)
    old_logps_RMK = pool.logps_RC.gather(1, at).view_as(logps_RMK)
    merged = merge_max(old_tokens_RMK, old_logps_RMK, tokens_RMK, logps_RMK)
    scores_RMK = pool.scores_RC.gather(1, hesitant.nodes_RX)[..., None] + merged.logps_RMK
    holders_RMK = torch.where(merged.won_RMK, rows_M[:, None], hesitant.feature_rows_RX[..., None])
    refined = replace(
        pool,
        logps_RC=pool.logps_RC.scatter(1, at, merged.logps_RMK.flatten(1)),
        scores_RC=pool.scores_RC.scatter(1, at, scores_RMK.flatten(1)),
        holders_RC=pool.holders_RC.scatter(1, at, holders_RMK.flatten(1)),
        fresh_RC=pool.fresh_RC & torch.zeros_like(pool.fresh_RC).scatter(1, at, merged.won_RMK.flatten(1)),
    )
    return refined, merged.novel_logps_RMK
