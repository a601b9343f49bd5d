"""One round of drafting: grow the best new nodes, reconsider the least confident old ones, in one forward a step.

R requests, C candidates, F nodes grown (level 0), M nodes reconsidered (level 1), X = F + M rows of one forward,
K offered children, Y rows of the round so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.config import TreeConfig
from secondguess.tree.candidates import Candidates, Picks, append, depth_of, plant, token_of
from secondguess.tree.merge import refine
from secondguess.tree.rows import DraftRows, Offers, Root
from secondguess.tree.select import best_fresh, cut, least_confident
from secondguess.types import DraftTree


def grow(config: TreeConfig, root: Root, forward: Callable[[DraftRows], Offers]) -> DraftTree:
    """Draft a tree with ``num_steps`` - 1 forwards of the drafter, level 0 and level 1 side by side in each.

    ``forward`` keeps the feature and K/V of every row it gets: later rows refer to them by number. With
    ``num_reconsider`` = 0 this is EAGLE-2's expansion (arXiv 2406.16858) bit for bit.
    """
    offers = root.offers
    zeros_R1 = torch.zeros_like(root.tokens_R[:, None])
    prev = Picks(nodes_RX=zeros_R1, feature_rows_RX=zeros_R1, valid_RX=zeros_R1 == 0)
    pool = append(plant(root), prev.nodes_RX, zeros_R1, offers.tokens_RXK, offers.logps_RXK)
    lineage_RYY = prev.valid_RX[..., None]
    for _ in range(1, config.num_steps):
        grown = best_fresh(pool, min(config.grow_width, offers.tokens_RXK[0].numel()))
        hesitant = least_confident(pool, prev, offers.confidence_RX, config.num_reconsider)
        num_level0 = grown.nodes_RX.shape[1]
        rows, lineage_RYY = lay_rows(pool, lineage_RYY, grown.then(hesitant), num_level0)
        offers = forward(rows)
        pool = absorb(pool, rows, grown, hesitant, offers)
        prev = forwarded(grown, rows)
    level1_RY = ~lineage_RYY.diagonal(dim1=1, dim2=2)
    return cut(pool, level1_RY, config.budget)


def lay_rows(pool: Candidates, lineage_RYY: Tensor, picks: Picks, num_level0: int) -> tuple[DraftRows, Tensor]:
    """The rows of the next forward, and the lineage with these rows added.

    ``lineage[y]`` marks the rows that whoever is fed by row y may see: what row y sees, less row y itself at level 1.
    So a row sees the lineage of the row that feeds it, and itself.
    """
    num_requests, num_rows = picks.nodes_RX.shape
    seen_RXY = lineage_RYY.take_along_dim(picks.feature_rows_RX[..., None], 1)
    itself_XX = torch.eye(num_rows, dtype=torch.bool, device=seen_RXY.device)
    inherited_XX = pad(itself_XX[:, :num_level0], (0, num_rows - num_level0))
    keys_RX = pool.keys_RC.gather(1, picks.nodes_RX)
    rows = DraftRows(
        tokens_RX=token_of(keys_RX),
        feature_rows_RX=picks.feature_rows_RX,
        depths_RX=depth_of(keys_RX),
        visible_RXY=torch.cat((seen_RXY, itself_XX.expand(num_requests, -1, -1)), 2),
        valid_RX=picks.valid_RX,
        num_level0=num_level0,
    )
    added_RXY = torch.cat((seen_RXY, inherited_XX.expand(num_requests, -1, -1)), 2)
    return rows, torch.cat((pad(lineage_RYY, (0, num_rows)), added_RXY), 1)


def absorb(pool: Candidates, rows: DraftRows, grown: Picks, hesitant: Picks, offers: Offers) -> Candidates:
    """Add what a forward offers. Level 1 goes first: it may raise the scores that level 0 builds on."""
    num_rows, num_level0 = rows.visible_RXY.shape[2], rows.num_level0
    rows_M = torch.arange(num_rows - hesitant.nodes_RX.shape[1], num_rows, device=rows.tokens_RX.device)
    logps_RXK = torch.where(rows.valid_RX[..., None], offers.logps_RXK, -torch.inf)
    waiting = replace(pool, fresh_RC=pool.fresh_RC.scatter(1, grown.nodes_RX, False))
    refined_tokens_RMK, refined_logps_RMK = offers.tokens_RXK[:, num_level0:], logps_RXK[:, num_level0:]
    refined, novel_logps_RMK = refine(waiting, hesitant, refined_tokens_RMK, refined_logps_RMK, rows_M)
    nodes_RX = torch.cat((grown.nodes_RX, hesitant.nodes_RX), 1)
    logps_RXK = torch.cat((logps_RXK[:, :num_level0], novel_logps_RMK), 1)
    return append(refined, nodes_RX, rows.depths_RX, offers.tokens_RXK, logps_RXK)


def forwarded(grown: Picks, rows: DraftRows) -> Picks:
    """The grown nodes as level 1 would take them: fed by their own rows."""
    first_row = rows.visible_RXY.shape[2] - rows.visible_RXY.shape[1]
    own_rows_F = torch.arange(first_row, first_row + rows.num_level0, device=rows.tokens_RX.device)
    return replace(grown, feature_rows_RX=own_rows_F.expand_as(grown.nodes_RX))
