"""The drafter's greedy chain with a second look at every node of it: what Figure 1 and Table 7 are about.

In serving level 1 sees only the least confident nodes, and changes what is drafted. Here it changes nothing, so both
levels are known at each position that the one-pass chain reaches.

R requests, D nodes of the chain that are looked at (the root is 0), X rows of a forward, Y rows of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Roots
from secondguess.tree.rows import DraftRows
from secondguess.types import DraftTree


@dataclass(frozen=True, slots=True)
class Guesses:
    """The token that one level finds most probable after each node of a chain, and how probable."""

    tokens_RD: Tensor  # int64 target ids
    confidence_RD: Tensor


class ChainSpeculator(EagleSpeculator):
    """Drafts ``num_steps`` tokens, each the top-1 of level 0, and keeps what both levels said on the way.

    ``config`` gives ``num_steps`` and how second looks are taken; by default ``drafter`` needs a self-query for them.
    """

    level0: Guesses  # of the newest draft
    level1: Guesses

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int) -> None:
        steps = config.num_steps
        look = replace(config.reconsider, refined_offer_width=None)
        chain = replace(config, budget=steps, grow_width=1, offer_width=1, num_reconsider=1, reconsider=look)
        super().__init__(drafter, chain, num_slots, num_columns)

    @torch.inference_mode()
    def draft(self, roots: Roots) -> DraftTree:
        root, round_ = self.begin(roots)
        offers, node_R = [root.offers], root.tokens_R
        for depth in range(1, self.config.num_steps + 1):
            child_R = offers[-1].tokens_RXK[:, 0, 0]  # level 0 is the first row of each forward
            offers.append(round_.forward(chain_rows(depth, child_R, node_R, self.config.reconsider.see_own_level0)))
            node_R = child_R
        tokens_RY = torch.cat([o.tokens_RXK[:, :, 0] for o in offers], 1)
        confidence_RY = torch.cat([o.confidence_RX for o in offers], 1)
        rows0 = [0, *range(1, tokens_RY.shape[1] - 2, 2)]  # the last node's own look is not needed
        self.level0 = Guesses(tokens_RY[:, rows0], confidence_RY[:, rows0])
        self.level1 = Guesses(tokens_RY[:, 2::2], confidence_RY[:, 2::2])
        return chain_tree(root.tokens_R, self.level0)


def chain_rows(depth: int, child_R: Tensor, node_R: Tensor, see_own_level0: bool = True) -> DraftRows:
    """The forward that follows a chain of ``depth`` nodes: level 0 of the next node, level 1 of the last one.

    Row 0 of the draft is the root's. Row 2d - 1 is level 0 of the node at depth d, row 2d level 1 of the one above it.
    Both rows of a forward are fed by the last node's level-0 row and see the level-0 rows down to it, and themselves
    (level 1 loses sight of its own node's level-0 row where ``see_own_level0`` is off).
    """
    num_requests, device = len(child_R), child_R.device
    row_Y = torch.arange(2 * depth + 1, device=device)
    above_Y = ((row_Y == 0) | (row_Y % 2 == 1)) & (row_Y < 2 * depth - 1)
    visible_XY = above_Y | (row_Y == row_Y[-2:, None])
    fed_by = max(2 * depth - 3, 0)
    visible_XY[1, fed_by] &= see_own_level0
    tokens_RX = torch.stack((child_R, node_R), 1)
    return DraftRows(
        tokens_RX=tokens_RX,
        feature_rows_RX=torch.full_like(tokens_RX, fed_by),
        depths_RX=torch.tensor([depth, depth - 1], device=device).expand(num_requests, -1),
        visible_RXY=visible_XY.expand(num_requests, -1, -1),
        valid_RX=torch.ones_like(tokens_RX, dtype=torch.bool),
        num_level0=1,
    )


def chain_tree(root_R: Tensor, guesses: Guesses) -> DraftTree:
    """A root and one branch."""
    tokens_RN = torch.cat((root_R[:, None], guesses.tokens_RD), 1)
    index_RN = torch.arange(tokens_RN.shape[1], device=root_R.device).expand_as(tokens_RN)
    logps_RN = torch.nn.functional.pad(guesses.confidence_RD.log(), (1, 0))
    return DraftTree(
        tokens_RN=tokens_RN,
        parents_RN=index_RN - 1,
        depths_RN=index_RN,
        levels_RN=torch.zeros_like(index_RN),
        scores_RN=logps_RN.cumsum(1),
        valid_RN=index_RN >= 0,
    )
