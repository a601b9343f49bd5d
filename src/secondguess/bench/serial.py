"""Reconsideration without co-forwarding: second looks take a forward of their own. What Table 9 compares with.

R requests, F rows of level 0, M of level 1, X = F + M rows of one forward, Y rows of the round so far, K offers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from secondguess.drafter.replayed import ReplayedSpeculator
from secondguess.drafter.speculator import Begin, EagleSpeculator
from secondguess.engine.cycle import Engine
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import DraftTree


class SerialSpeculator(EagleSpeculator):
    """Drafts the trees that ``EagleSpeculator`` does, with a forward more in every step that reconsiders."""

    def grow(self, begin: Begin) -> DraftTree:
        root, round_ = self.start(begin)
        return self.grow_tree(self.config, root, in_series(round_.forward), None)


class ReplayedSerial(SerialSpeculator, ReplayedSpeculator):
    """The same, the draft a CUDA graph."""


def in_series(forward: Callable[[DraftRows], Offers]) -> Callable[[DraftRows], Offers]:
    """``forward``, with the rows of level 0 and those of level 1 in calls of their own. Rows keep their numbers."""

    def forward_twice(rows: DraftRows) -> Offers:
        if rows.num_level0 == rows.tokens_RX.shape[1]:
            return forward(rows)
        return joined(*map(forward, split(rows)))

    return forward_twice


def split(rows: DraftRows) -> tuple[DraftRows, DraftRows]:
    """Level 0 and level 1. Level-0 rows lose sight of the level-1 rows after them, which they never saw."""
    num_seen = rows.visible_RXY.shape[2] - (rows.visible_RXY.shape[1] - rows.num_level0)
    level0 = part(rows, slice(None, rows.num_level0))
    level1 = part(rows, slice(rows.num_level0, None))
    return (
        replace(level0, visible_RXY=level0.visible_RXY[..., :num_seen], known_tokens_RMK=None),
        replace(level1, num_level0=0),
    )


def part(rows: DraftRows, at: slice) -> DraftRows:
    return replace(
        rows,
        tokens_RX=rows.tokens_RX[:, at],
        feature_rows_RX=rows.feature_rows_RX[:, at],
        depths_RX=rows.depths_RX[:, at],
        visible_RXY=rows.visible_RXY[:, at],
        valid_RX=rows.valid_RX[:, at],
    )


def joined(first: Offers, second: Offers) -> Offers:
    """The offers of level 0, then those of level 1."""
    doubt_RX = None
    if first.doubt_RX is not None and second.doubt_RX is not None:
        doubt_RX = torch.cat((first.doubt_RX, second.doubt_RX), 1)
    return Offers(
        torch.cat((first.tokens_RXK, second.tokens_RXK), 1),
        torch.cat((first.logps_RXK, second.logps_RXK), 1),
        torch.cat((first.confidence_RX, second.confidence_RX), 1),
        doubt_RX,
        second.known_logps_RMK,
    )


def look_in_series(engine: Engine) -> None:
    """Let an engine that has decoded nothing yet draft so; as a CUDA graph, if that is how it drafts."""
    old = engine.speculator
    assert isinstance(old, EagleSpeculator)
    kind = ReplayedSerial if isinstance(old, ReplayedSpeculator) else SerialSpeculator
    engine.speculator = kind(old.drafter, old.config, engine.cache.num_slots, old.cache.num_columns)
