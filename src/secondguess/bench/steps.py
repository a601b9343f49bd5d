"""What a draft does step by step: which nodes every forward of the drafter takes, at which level.

R requests (1 here), X rows of a forward, Y rows of the round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Roots
from secondguess.tree.grow import grow
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import DraftTree


@dataclass(frozen=True, slots=True)
class Look:
    """A row of a forward: a node at one level. ``node`` and ``parent`` are numbers of level-0 rows, the root's is 0."""

    node: int  # at level 0 this row's own number
    parent: int  # -1 at the root
    token: int
    depth: int
    level: int
    guess: int  # the token that it finds most probable to come next
    confidence: float  # how probable that is


class StepWatch(EagleSpeculator):
    """Drafts as ever, for one request; keeps the newest draft's looks: a list per forward, the extend pass first."""

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int) -> None:
        super().__init__(drafter, config, num_slots, num_columns)
        self.steps: list[list[Look]] = []

    @torch.inference_mode()
    def draft(self, roots: Roots) -> DraftTree:
        root, round_ = self.begin(roots)
        guess, confidence = int(root.offers.tokens_RXK[0, 0, 0]), float(root.offers.confidence_RX[0, 0])
        self.steps = [[Look(0, -1, roots.tokens[0], 0, 0, guess, confidence)]]

        def forward(rows: DraftRows) -> Offers:
            offers = round_.forward(rows)
            self.steps.append(looks_of(rows, offers))
            return offers

        return grow(self.config, root, forward)


def looks_of(rows: DraftRows, offers: Offers) -> list[Look]:
    """The valid rows of the only request. A row sees the level-0 rows from the root's down to its own node's."""
    visible_XY, num_before = rows.visible_RXY[0], rows.visible_RXY.shape[2] - rows.visible_RXY.shape[1]
    columns = (rows.tokens_RX, rows.depths_RX, offers.tokens_RXK[..., 0], offers.confidence_RX)
    looks = []
    for x, (token, depth, guess, confidence) in enumerate(zip(*(c[0].tolist() for c in columns), strict=True)):
        if rows.valid_RX[0, x]:
            level = int(x >= rows.num_level0)
            chain = visible_XY[x, :num_before].nonzero()[:, 0].tolist() + ([] if level else [num_before + x])
            looks.append(Look(chain[-1], chain[-2] if len(chain) > 1 else -1, token, depth, level, guess, confidence))
    return looks
