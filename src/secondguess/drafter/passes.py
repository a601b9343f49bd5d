"""Passes of the drafter over its K/V: the extend pass over true features, and the rounds that grow a tree.

The drafter's column p holds the pair (feature p, token p + 1) at position p. The newest pair is the root's row; during
a round, row y lies ``y`` columns after it, and is forgotten when the round ends.

R requests, E new pairs, X rows of a forward, Y rows of the round, N rows, W columns, A heads, G K/V heads, D head
size, K offers, V draft vocabulary, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from secondguess.config import TreeConfig
from secondguess.drafter.look import ask, offer
from secondguess.drafter.model import Drafter
from secondguess.engine.slots import SlotCache
from secondguess.target.attention import FusedAttention
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import Rows

C = TypeVar("C")  # where the drafter's K/V lie


@dataclass(frozen=True, slots=True)
class Pairs:
    """What an extend pass reads of some requests: the pairs that wait there, then padding."""

    slots: tuple[int, ...]
    slots_R: Tensor  # int64, the same
    tokens_RE: Tensor  # int64
    taps_RELH: Tensor
    start_R: Tensor  # int64: columns committed before
    counts_R: Tensor  # int64: pairs that are no padding, one at least
    width: int  # columns that the pass looks at
    length: int  # columns that will be committed after it, in the request that has most


class Passes(ABC, Generic[C]):
    """One drafter over one cache, for trees of one shape."""

    def __init__(self, drafter: Drafter, config: TreeConfig, cache: C) -> None:
        self.drafter, self.config, self.cache = drafter, config, cache

    def extend(self, pairs: Pairs) -> Tensor:
        """Run M over the pairs with the target's true features; return the newest pair's feature [R, H]."""
        tokens_RE, device = pairs.tokens_RE, pairs.tokens_RE.device
        R, E = tokens_RE.shape
        columns_RE = pairs.start_R[:, None] + torch.arange(E, device=device)
        # Padding lies after the last pair, where only padding looks and the round's rows overwrite it.
        columns_W = torch.arange(pairs.width, device=device)
        rows = Rows(
            slots_R=pairs.slots_R,
            tokens_RN=tokens_RE,
            positions_RN=columns_RE,
            columns_RN=columns_RE,
            visible_RNW=columns_W <= columns_RE[..., None],
            column_positions_RW=columns_W.expand(R, -1),
            slots=pairs.slots,
        )
        f_REH = self.run(rows, self.drafter.embed(tokens_RE), self.drafter.fuse(pairs.taps_RELH))
        return f_REH[torch.arange(R, device=device), pairs.counts_R - 1]

    def run(self, rows: Rows, e_RXH: Tensor, g_RXH: Tensor) -> Tensor:
        """The block M over rows of the cache: -> post-norm features [R, X, H]."""
        if self.drafter.native is not None:
            assert isinstance(self.cache, SlotCache), "compiled code reads the slots by itself"
            return self.drafter.native(self.cache, rows, e_RXH, g_RXH)

        def attend(layer: int, q_RXAD: Tensor, k_RXGD: Tensor, v_RXGD: Tensor) -> Tensor:
            q_RAXD, k_RGXD, v_RGXD = q_RXAD.transpose(1, 2), k_RXGD.transpose(1, 2), v_RXGD.transpose(1, 2)
            return self.attend(layer, rows, q_RAXD, k_RGXD, v_RGXD)

        return self.drafter.block(e_RXH, g_RXH, rows.positions_RN, attend)

    @abstractmethod
    def attend(self, layer: int, rows: Rows, q_RAXD: Tensor, k_RGXD: Tensor, v_RGXD: Tensor) -> Tensor:
        """Store the rows' K/V, then attend to all that they see: [R, X, A, D]."""

    def offers(self, f_RXH: Tensor, known_RMK: Tensor | None = None, noise_RXV: Tensor | None = None) -> Offers:
        """Top-k children of each feature. Temperature is 1 whatever the request asks."""
        return offer(self.drafter, self.config, f_RXH, known_RMK, noise_RXV)


def attention(visible_RNW: Tensor, q_RAXD: Tensor, k_RGWD: Tensor, v_RGWD: Tensor) -> Tensor:
    """[R, X, A, D]."""
    fused = FusedAttention(visible_RNW, q_RAXD, k_RGWD.shape[1])
    return fused(q_RAXD, k_RGWD, v_RGWD, q_RAXD.shape[-1] ** -0.5)


class Round:
    """One draft: the features of its rows, and where they lie in the cache."""

    def __init__(self, passes: Passes[Any], pairs: Pairs, f_root_RH: Tensor, noise_RDV: Tensor | None = None) -> None:
        """``noise_RDV``: of the tokens at depths 1, 2, ..., where drafting is coupled."""
        self.passes, self.noise_RDV = passes, noise_RDV
        self.features_RYH = f_root_RH[:, None]
        self.slots, self.slots_R = pairs.slots, pairs.slots_R
        self.root_column_R1 = (pairs.start_R + pairs.counts_R)[:, None] - 1
        self.max_length = pairs.length

    def root_offers(self) -> Offers:
        return self.offers(self.features_RYH, torch.zeros_like(self.root_column_R1))

    def forward(self, rows: DraftRows) -> Offers:
        """M over new rows of the round, level 0 and level 1 in one batch."""
        drafter = self.passes.drafter
        hidden = self.features_RYH.shape[-1]
        g_RXH = self.features_RYH.gather(1, rows.feature_rows_RX[..., None].expand(-1, -1, hidden))
        e_RXH = drafter.embed(rows.tokens_RX)
        if rows.num_level0 < e_RXH.shape[1]:
            again, look = slice(rows.num_level0, None), self.passes.config.reconsider
            e_RXH[:, again], g_RXH[:, again] = ask(drafter, look, e_RXH[:, again], g_RXH[:, again])
        f_RXH = self.passes.run(self.place(rows), e_RXH, g_RXH)
        self.features_RYH = torch.cat([self.features_RYH, f_RXH], dim=1)
        return self.offers(f_RXH, rows.depths_RX, rows.known_tokens_RMK)

    def offers(self, f_RXH: Tensor, depths_RX: Tensor, known_RMK: Tensor | None = None) -> Offers:
        """Top-k children of each feature, whose nodes are at ``depths_RX``."""
        noise_RXV = self.noise_RDV
        if noise_RXV is not None:
            noise_RXV = noise_RXV[torch.arange(len(f_RXH), device=f_RXH.device)[:, None], depths_RX]
        return self.passes.offers(f_RXH, known_RMK, noise_RXV)

    def place(self, rows: DraftRows) -> Rows:
        """Rows of the round as rows of the cache: everything before the root's column is visible to all."""
        R, X, Y = rows.visible_RXY.shape
        row_X = torch.arange(Y - X, Y, device=self.slots_R.device)
        columns_W = torch.arange(self.max_length + Y - 1, device=self.slots_R.device)
        row_RW = columns_W - self.root_column_R1  # 0 at the root's column
        in_round_RXW = rows.visible_RXY.gather(2, row_RW.clamp(0, Y - 1)[:, None].expand(-1, X, -1))
        positions_RX = self.root_column_R1 + rows.depths_RX
        if self.passes.config.reconsider.query_rope == "next":
            positions_RX[:, rows.num_level0 :] += 1
        return Rows(
            slots_R=self.slots_R,
            tokens_RN=rows.tokens_RX,
            positions_RN=positions_RX,
            columns_RN=self.root_column_R1 + row_X,
            visible_RNW=(in_round_RXW & (row_RW < Y)[:, None]) | (row_RW < 0)[:, None],
            column_positions_RW=columns_W.expand(R, -1),
            slots=self.slots,
        )
