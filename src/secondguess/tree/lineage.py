"""Which rows of a round see which.

R requests, F rows of level 0, M of level 1, X = F + M rows of one forward, K offered children, Y rows of the round.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.config import Reconsider
from secondguess.tree.candidates import Candidates, Picks, children_of, depth_of, token_of
from secondguess.tree.rows import DraftRows


def lay_rows(
    pool: Candidates, lineage_RYY: Tensor, grown: Picks, hesitant: Picks, reconsider: Reconsider, num_offers: int
) -> tuple[DraftRows, Tensor]:
    """The rows of the next forward, and the lineage with these rows added.

    ``lineage[y]`` marks the rows that whoever is fed by row y may see: what row y sees, less row y itself at level 1.
    So a row sees the lineage of the row that feeds it, and itself.
    """
    picks, num_level0 = grown.then(hesitant), grown.nodes_RX.shape[1]
    num_requests, num_rows = picks.nodes_RX.shape
    seen_RXY = lineage_RYY.take_along_dim(picks.feature_rows_RX[..., None], 1)
    itself_XX = torch.eye(num_rows, dtype=torch.bool, device=seen_RXY.device)
    inherited_XX = pad(itself_XX[:, :num_level0], (0, num_rows - num_level0))
    keys_RX = pool.keys_RC.gather(1, picks.nodes_RX)
    attended_RXY = seen_RXY if reconsider.see_own_level0 else without_own(seen_RXY, picks, num_level0)
    rows = DraftRows(
        tokens_RX=token_of(keys_RX),
        feature_rows_RX=picks.feature_rows_RX,
        depths_RX=depth_of(keys_RX),
        visible_RXY=torch.cat((attended_RXY, itself_XX.expand(num_requests, -1, -1)), 2),
        valid_RX=picks.valid_RX,
        num_level0=num_level0,
        known_tokens_RMK=known_tokens(pool, hesitant, num_offers) if reconsider.asks_for_known else None,
    )
    added_RXY = torch.cat((seen_RXY, inherited_XX.expand(num_requests, -1, -1)), 2)
    return rows, torch.cat((pad(lineage_RYY, (0, num_rows)), added_RXY), 1)


def without_own(seen_RXY: Tensor, picks: Picks, num_level0: int) -> Tensor:
    """Level-1 rows lose sight of the level-0 row that feeds them."""
    own_RXY = torch.zeros_like(seen_RXY).scatter(2, picks.feature_rows_RX[..., None], True)
    own_RXY[:, :num_level0] = False
    return seen_RXY & ~own_RXY


def known_tokens(pool: Candidates, hesitant: Picks, num_offers: int) -> Tensor:
    """int64 [R, M, K]: what level 0 offered after each of the ``hesitant`` nodes."""
    children_RMK = children_of(hesitant, num_offers)
    return token_of(pool.keys_RC.gather(1, children_RMK.flatten(1))).view(children_RMK.shape)


def fed_by_level0(picks: Picks, lineage_RYY: Tensor) -> Picks:
    """``picks`` fed by level-0 rows alone: in place of a level-1 row its node's own, the last one in its lineage."""
    rows_Y = torch.arange(lineage_RYY.shape[1], device=lineage_RYY.device)
    level0_RY = (lineage_RYY * rows_Y).amax(2)
    return replace(picks, feature_rows_RX=level0_RY.gather(1, picks.feature_rows_RX))


def forwarded(grown: Picks, rows: DraftRows) -> Picks:
    """The grown nodes as level 1 would take them: fed by their own rows."""
    first_row = rows.visible_RXY.shape[2] - rows.visible_RXY.shape[1]
    own_rows_F = torch.arange(first_row, first_row + rows.num_level0, device=rows.tokens_RX.device)
    return replace(grown, feature_rows_RX=own_rows_F.expand_as(grown.nodes_RX))
