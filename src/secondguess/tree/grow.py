"""One round of drafting: grow the best new nodes, reconsider the most doubtful old ones, in one forward a step.

R requests, C candidates, F nodes grown (level 0), M nodes reconsidered (level 1), X = F + M rows of one forward,
K offered children, Y rows of the round so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from secondguess.config import Reconsider, TreeConfig
from secondguess.tree.candidates import Candidates, Picks, append, follow, marked, plant
from secondguess.tree.cut import cut
from secondguess.tree.guide import Fixed, Guide
from secondguess.tree.hesitate import Waiting, hesitate, most_doubtful, wait, wait_at_root
from secondguess.tree.lineage import fed_by_level0, forwarded, lay_rows
from secondguess.tree.merge import refine
from secondguess.tree.rows import DraftRows, Offers, Root
from secondguess.tree.select import best_children, best_fresh
from secondguess.types import DraftTree


def grow(
    config: TreeConfig, root: Root, forward: Callable[[DraftRows], Offers], guide: Guide | None = None
) -> DraftTree:
    """Draft a tree with ``num_steps`` - 1 forwards of the drafter, level 0 and level 1 side by side in each.

    ``forward`` keeps the feature and K/V of every row it gets: later rows refer to them by number. With
    ``num_reconsider`` = 0 this is EAGLE-2's expansion (arXiv 2406.16858) bit for bit. ``guide`` may stop earlier, and
    give each request a budget of its own; then the trees are padded to the largest.
    """
    offers, reconsider, guide = root.offers, config.reconsider, guide or Fixed(config.max_budget)
    zeros_R1 = torch.zeros_like(root.tokens_R[:, None])
    start = Picks(nodes_RX=zeros_R1, feature_rows_RX=zeros_R1, valid_RX=zeros_R1 == 0)
    pool = append(plant(root), zeros_R1, zeros_R1, offers.tokens_RXK, offers.logps_RXK)
    waiting = wait_at_root(start, offers, reconsider)
    lineage_RYY = start.valid_RX[..., None]
    for step in range(1, config.num_steps):
        if not guide.goes_on(pool):
            break
        grown = advance(config, pool, waiting, offers, lineage_RYY)
        hesitant, waiting = hesitate(pool, waiting, config, step)
        rows, lineage_RYY = lay_rows(pool, lineage_RYY, grown, hesitant, reconsider, config.offer_width)
        offers = forward(rows)
        pool = absorb(pool, rows, grown, hesitant, offers, reconsider)
        waiting = wait(waiting, forwarded(grown, rows), offers, reconsider.pool)
    level1_RY = ~lineage_RYY.diagonal(dim1=1, dim2=2)
    tree = cut(pool, level1_RY, guide.budgets(pool), falling=reconsider.propagate)
    return replace(tree, deepest=config.num_steps)


def advance(config: TreeConfig, pool: Candidates, waiting: Waiting, offers: Offers, lineage_RYY: Tensor) -> Picks:
    """The nodes to grow after ``offers``: the best fresh ones and, as a control, children of the most doubtful."""
    # While fewer than grow_width are offered, all that was fresh has been grown: level 1 makes no old one fresh again.
    grown = best_fresh(pool, min(config.grow_width, offers.tokens_RXK[0].numel()))
    if config.extra_advance:
        children = best_children(pool, waiting.picks, grown, config.offer_width)
        able = replace(waiting, picks=replace(waiting.picks, valid_RX=children.valid_RX))
        grown = grown.then(children.take(most_doubtful(pool, able, "low_top1", config.extra_advance)))
    return fed_by_level0(grown, lineage_RYY) if config.reconsider.child_feature == "level0" else grown


def absorb(
    pool: Candidates, rows: DraftRows, grown: Picks, hesitant: Picks, offers: Offers, reconsider: Reconsider
) -> Candidates:
    """Add what a forward offers. Level 1 goes first: it may raise the scores that level 0 builds on."""
    num_rows, num_level0 = rows.visible_RXY.shape[2], rows.num_level0
    rows_M = torch.arange(num_rows - hesitant.nodes_RX.shape[1], num_rows, device=rows.tokens_RX.device)
    logps_RXK = torch.where(rows.valid_RX[..., None], offers.logps_RXK, -torch.inf)
    logps_RXK[:, num_level0:, reconsider.refined_offer_width or logps_RXK.shape[2] :] = -torch.inf
    pool = replace(pool, forwarded_RC=pool.forwarded_RC | marked(grown, pool.keys_RC.shape[1]))
    refined_tokens_RMK, refined_logps_RMK = offers.tokens_RXK[:, num_level0:], logps_RXK[:, num_level0:]
    refined, novel_logps_RMK = refine(
        pool, hesitant, refined_tokens_RMK, refined_logps_RMK, rows_M, reconsider.merge, offers.known_logps_RMK
    )
    nodes_RX = torch.cat((grown.nodes_RX, hesitant.nodes_RX), 1)
    logps_RXK = torch.cat((logps_RXK[:, :num_level0], novel_logps_RMK), 1)
    scores_RC = refined.scores_RC if reconsider.propagate else pool.scores_RC
    offered = append(refined, nodes_RX, rows.depths_RX, offers.tokens_RXK, logps_RXK, scores_RC.gather(1, nodes_RX))
    # In the previous batch no re-scored child has children but those that have just been appended.
    return follow(offered) if reconsider.propagate and reconsider.pool != "prev_batch" else offered
