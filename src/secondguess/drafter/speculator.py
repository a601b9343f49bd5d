"""EAGLE-3.1 / PR drafting on a slot K/V cache: extend over what was accepted, then grow a tree.

The drafter's column p of a slot holds the pair (feature p, token p + 1) at position p. The newest pair is the root's
row; during a round, row y lies ``y`` columns after it, and is forgotten when the round ends.

R requests, E new pairs, X rows of a forward, Y rows of the round, W columns, K offers, V draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from secondguess.config import TreeConfig
from secondguess.device import upload
from secondguess.drafter.coupling import coming_noise
from secondguess.drafter.look import ask, offer
from secondguess.drafter.model import Drafter
from secondguess.engine.slots import SlotCache
from secondguess.engine.speculate import Accepted, Roots
from secondguess.target.attention import FusedAttention
from secondguess.tree.grow import grow
from secondguess.tree.rows import DraftRows, Offers, Root
from secondguess.types import DraftTree, Rows, Verdict

MOST_BEHIND = 16  # tokens that a draft may have to read first, where others were decoded plainly


@dataclass(slots=True)
class Slot:
    """A request's committed columns, and the pairs that the next extend pass takes."""

    num_columns: int
    tokens: Tensor  # int64 [E]
    taps: Tensor  # [E, L, H]


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


@dataclass(frozen=True, slots=True)
class Begin:
    """What a draft begins with. All else follows from it on the device."""

    pairs: Pairs
    roots_R: Tensor  # int64: newest emitted tokens
    noise_RDV: Tensor | None  # of the tokens to come, where drafting is coupled


class EagleSpeculator:
    """Drafts for the requests of one engine with one drafter and one tree shape."""

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int) -> None:
        self.drafter, self.config, self.num_steps = drafter, config, config.num_steps
        c, weight = drafter.config, drafter.norm.weight
        extra = 1 + config.num_steps * config.rows_per_step
        shapes = [(c.num_key_value_heads, c.head_dim)] * c.num_layers
        self.cache = SlotCache(num_slots, num_columns + extra, shapes, weight.dtype, weight.device)
        self.slots: dict[int, Slot] = {}

    def accept(self, accepted: list[Accepted]) -> None:
        self.catch_up([a.slot for a in accepted if a.slot in self.slots])
        for a in accepted:
            slot = self.slots.get(a.slot)
            if slot is None:
                self.slots[a.slot] = self.read_prompt(a)
            else:
                slot.tokens, slot.taps = torch.cat([slot.tokens, a.tokens]), torch.cat([slot.taps, a.taps_ELH])

    def release(self, slot: int) -> None:
        self.slots.pop(slot, None)
        self.cache.release(slot)

    def steps_for(self, slot: int) -> int:
        return self.num_steps

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """One tree shape has nothing to learn."""

    @torch.inference_mode()
    def catch_up(self, numbers: list[int]) -> None:
        """Read what was accepted while nothing was drafted, before it grows into a prompt of its own."""
        behind = [n for n in numbers if len(self.slots[n].tokens) >= MOST_BEHIND]
        if behind:
            self.extend(take_pairs(behind, [self.slots[n] for n in behind]))

    @torch.inference_mode()
    def read_prompt(self, a: Accepted) -> Slot:
        """Extend over all pairs but the newest, which is left to the first draft: there prompts of all lengths meet."""
        slot = Slot(0, a.tokens[:-1], a.taps_ELH[:-1])
        if len(slot.tokens):
            self.extend(take_pairs([a.slot], [slot]))
        return Slot(slot.num_columns, a.tokens[-1:], a.taps_ELH[-1:])

    @torch.inference_mode()
    def draft(self, roots: Roots) -> DraftTree:
        return self.grow(self.prepare(roots))

    def begin(self, roots: Roots) -> tuple[Root, Round]:
        """Extend over what was accepted: what the roots offer, and the round that forwards their descendants."""
        return self.start(self.prepare(roots))

    def prepare(self, roots: Roots) -> Begin:
        """What a draft begins with; the host has nothing to add after that."""
        pairs = take_pairs(roots.slots, [self.slots[s] for s in roots.slots])
        noise_RDV = self.noise(roots) if self.config.coupled else None
        return Begin(pairs, upload(roots.tokens, pairs.tokens_RE.device), noise_RDV)

    def grow(self, begin: Begin) -> DraftTree:
        root, round_ = self.start(begin)
        return grow(self.config, root, round_.forward)

    def start(self, begin: Begin) -> tuple[Root, Round]:
        round_ = Round(self, begin.pairs, self.extend(begin.pairs), begin.noise_RDV)
        return Root(begin.roots_R, round_.root_offers()), round_

    def noise(self, roots: Roots) -> Tensor | None:
        """What the tokens of this round will be drawn with."""
        lengths = [len(history) for history in roots.histories]
        return coming_noise(roots.draws, lengths, self.config.num_steps + 1, self.drafter.target_ids)

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
            return self.drafter.native(self.cache, rows, e_RXH, g_RXH)

        def attend(layer: int, q_RXAD: Tensor, k_RXGD: Tensor, v_RXGD: Tensor) -> Tensor:
            k_RGWD, v_RGWD = self.cache.write(layer, rows, k_RXGD.transpose(1, 2), v_RXGD.transpose(1, 2))
            q_RAXD = q_RXAD.transpose(1, 2)
            fused = FusedAttention(rows.visible_RNW, q_RAXD, k_RGWD.shape[1])
            return fused(q_RAXD, k_RGWD, v_RGWD, q_RAXD.shape[-1] ** -0.5)

        return self.drafter.block(e_RXH, g_RXH, rows.positions_RN, attend)

    def offers(self, f_RXH: Tensor, known_RMK: Tensor | None = None, noise_RXV: Tensor | None = None) -> Offers:
        """Top-k children of each feature. Temperature is 1 whatever the request asks."""
        return offer(self.drafter, self.config, f_RXH, known_RMK, noise_RXV)


def take_pairs(numbers: Sequence[int], slots: Sequence[Slot]) -> Pairs:
    """The pairs that wait in ``slots``, which are known by ``numbers``. They count as committed from now on."""
    starts, counts = [s.num_columns for s in slots], [len(s.tokens) for s in slots]
    table_R3 = upload(list(zip(numbers, starts, counts, strict=True)), slots[0].tokens.device)
    slots_R, start_R, counts_R = table_R3.unbind(1)
    tokens_RE = pad_sequence([s.tokens for s in slots], batch_first=True)
    taps_RELH = pad_sequence([s.taps for s in slots], batch_first=True)
    for slot, count in zip(slots, counts, strict=True):
        slot.num_columns += count
        slot.tokens, slot.taps = slot.tokens[count:], slot.taps[count:]
    width, length = max(starts) + max(counts), max(s.num_columns for s in slots)
    return Pairs(tuple(numbers), slots_R, tokens_RE, taps_RELH, start_R, counts_R, width, length)


class Round:
    """One draft: the features of its rows, and where they lie in the cache."""

    def __init__(
        self, speculator: EagleSpeculator, pairs: Pairs, f_root_RH: Tensor, noise_RDV: Tensor | None = None
    ) -> None:
        """``noise_RDV``: of the tokens at depths 1, 2, ..., where drafting is coupled."""
        self.speculator, self.noise_RDV = speculator, noise_RDV
        self.features_RYH = f_root_RH[:, None]
        self.slots, self.slots_R = pairs.slots, pairs.slots_R
        self.root_column_R1 = (pairs.start_R + pairs.counts_R)[:, None] - 1
        self.max_length = pairs.length

    def root_offers(self) -> Offers:
        return self.offers(self.features_RYH, torch.zeros_like(self.root_column_R1))

    def forward(self, rows: DraftRows) -> Offers:
        """M over new rows of the round, level 0 and level 1 in one batch."""
        drafter = self.speculator.drafter
        hidden = self.features_RYH.shape[-1]
        g_RXH = self.features_RYH.gather(1, rows.feature_rows_RX[..., None].expand(-1, -1, hidden))
        e_RXH = drafter.embed(rows.tokens_RX)
        if rows.num_level0 < e_RXH.shape[1]:
            again, look = slice(rows.num_level0, None), self.speculator.config.reconsider
            e_RXH[:, again], g_RXH[:, again] = ask(drafter, look, e_RXH[:, again], g_RXH[:, again])
        f_RXH = self.speculator.run(self.place(rows), e_RXH, g_RXH)
        self.features_RYH = torch.cat([self.features_RYH, f_RXH], dim=1)
        return self.offers(f_RXH, rows.depths_RX, rows.known_tokens_RMK)

    def offers(self, f_RXH: Tensor, depths_RX: Tensor, known_RMK: Tensor | None = None) -> Offers:
        """Top-k children of each feature, whose nodes are at ``depths_RX``."""
        noise_RXV = self.noise_RDV
        if noise_RXV is not None:
            noise_RXV = noise_RXV[torch.arange(len(f_RXH), device=f_RXH.device)[:, None], depths_RX]
        return self.speculator.offers(f_RXH, known_RMK, noise_RXV)

    def place(self, rows: DraftRows) -> Rows:
        """Rows of the round as rows of the cache: everything before the root's column is visible to all."""
        R, X, Y = rows.visible_RXY.shape
        row_X = torch.arange(Y - X, Y, device=self.slots_R.device)
        columns_W = torch.arange(self.max_length + Y - 1, device=self.slots_R.device)
        row_RW = columns_W - self.root_column_R1  # 0 at the root's column
        in_round_RXW = rows.visible_RXY.gather(2, row_RW.clamp(0, Y - 1)[:, None].expand(-1, X, -1))
        positions_RX = self.root_column_R1 + rows.depths_RX
        if self.speculator.config.reconsider.query_rope == "next":
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
