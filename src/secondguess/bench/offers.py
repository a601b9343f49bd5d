"""What refined offers add to the first ones: most repeat a child that level 0 offered already.

R requests, X rows of a forward, M of them level 1, Y rows of the draft so far, I offers of a level-1 row, J of a
level-0 row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Roots
from secondguess.tree.grow import grow
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import DraftTree


class OfferWatch(EagleSpeculator):
    """Drafts as ever, and counts what refined offers add."""

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int) -> None:
        super().__init__(drafter, config, num_slots, num_columns)
        self.refined: Counter[str] = Counter()

    @torch.inference_mode()
    def draft(self, roots: Roots) -> DraftTree:
        root, round_ = self.begin(roots)
        seen = [root.offers]

        def forward(rows: DraftRows) -> Offers:
            offers = round_.forward(rows)
            width = self.config.reconsider.refined_offer_width or self.config.offer_width
            self.refined.update(count_refined(seen, rows, offers, width))
            seen.append(offers)
            return offers

        return grow(self.config, root, forward)


def count_refined(seen: Sequence[Offers], rows: DraftRows, offers: Offers, width: int) -> dict[str, int]:
    """Of the refined offers of a forward, ``width`` a node: all, those that repeat a level-0 child of their node, and
    those of them that find it more probable. ``seen``: the offers of all rows before, the root's first."""
    tokens_RYJ, logps_RYJ = (torch.cat([getattr(o, name) for o in seen], 1) for name in ("tokens_RXK", "logps_RXK"))
    own_RM1 = rows.feature_rows_RX[:, rows.num_level0 :, None]
    tokens_RMI, logps_RMI = (x[:, rows.num_level0 :, :width] for x in (offers.tokens_RXK, offers.logps_RXK))
    offered_RMI = rows.valid_RX[:, rows.num_level0 :, None] & (logps_RMI > -torch.inf)
    same_RMIJ = tokens_RMI[..., None] == tokens_RYJ.take_along_dim(own_RM1, 1)[..., None, :]
    same_RMIJ &= offered_RMI[..., None]
    higher_RMIJ = logps_RMI[..., None] > logps_RYJ.take_along_dim(own_RM1, 1)[..., None, :]
    return {
        "offered": total(offered_RMI),
        "duplicate": total(same_RMIJ.any(-1)),
        "raised": total((same_RMIJ & higher_RMIJ).any(-1)),
    }


def total(x: Tensor) -> int:
    return int(x.sum())
