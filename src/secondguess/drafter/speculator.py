"""EAGLE-3.1 / PR drafting on a slot K/V cache: extend over what was accepted, then grow a tree.

R requests, E new pairs, L tapped layers, D depths, V draft vocabulary, H hidden; of attention X rows, A heads, G K/V
heads, D head size.
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
from secondguess.drafter.model import Drafter
from secondguess.drafter.native import NativeRound
from secondguess.drafter.passes import Pairs, Passes, Round, attention
from secondguess.engine.slots import SlotCache
from secondguess.engine.speculate import Accepted, Prefix, Roots
from secondguess.kernels.grow import grower
from secondguess.tree.rows import Root
from secondguess.types import DraftTree, Rows, Speculation, Verdict

SHORT = 16  # pairs that a draft may have to read first of a prompt
MOST_BEHIND = 128  # or where others were decoded plainly


@dataclass(slots=True)
class Slot:
    """A request's committed columns, and the pairs that the next extend pass takes, in pieces as they came."""

    num_columns: int
    tokens: list[Tensor]  # int64 [E] each
    taps: list[Tensor]  # [E, L, H] each

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class Begin:
    """What a draft begins with. All else follows from it on the device."""

    pairs: Pairs
    roots_R: Tensor  # int64: newest emitted tokens
    noise_RDV: Tensor | None  # of the tokens to come, where drafting is coupled


class EagleSpeculator(Passes[SlotCache]):
    """Drafts for the requests of one engine with one drafter and one tree shape."""

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int) -> None:
        c, weight = drafter.config, drafter.norm.weight
        extra = 1 + config.num_steps * config.rows_per_step
        shapes = [(c.num_key_value_heads, c.head_dim)] * c.num_layers
        cache = SlotCache(num_slots, num_columns + extra, shapes, weight.dtype, weight.device)
        super().__init__(drafter, config, cache)
        self.grow_tree = grower(config, weight.device)
        self.new_round = NativeRound if NativeRound.takes(drafter, config) else Round
        self.num_steps = config.num_steps
        self.slots: dict[int, Slot] = {}

    def attend(self, layer: int, rows: Rows, q_RAXD: Tensor, k_RGXD: Tensor, v_RGXD: Tensor) -> Tensor:
        return attention(rows.visible_RNW, q_RAXD, *self.cache.write(layer, rows, k_RGXD, v_RGXD))

    def keeps(self, slot: int, speculation: Speculation, count: int) -> int:
        return min(count, self.slots[slot].num_columns) if slot in self.slots else 0

    def admit(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        if prefix is None:
            self.slots.pop(slot, None)
            return
        if prefix.slot != slot:
            self.cache.copy(prefix.slot, slot, prefix.count)
        self.slots[slot] = Slot(prefix.count, [], [])

    def accept(self, accepted: list[Accepted]) -> None:
        for a in accepted:
            slot = self.slots.setdefault(a.slot, Slot(0, [], []))
            slot.tokens.append(a.tokens)
            slot.taps.append(a.taps_ELH)
        self.catch_up([a.slot for a in accepted])

    def release(self, slot: int) -> None:
        self.slots.pop(slot, None)
        self.cache.release(slot)

    def steps_for(self, slot: int) -> int:
        return self.num_steps

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """One tree shape has nothing to learn."""

    @torch.inference_mode()
    def catch_up(self, numbers: list[int]) -> None:
        """Read pieces of prompts, and what was accepted while nothing was drafted.

        All pairs but the newest, which is left to the next draft. A piece is read by itself: others would be padded to
        its length.
        """
        pieces = [n for n in numbers if len(self.slots[n].tokens[-1]) > SHORT]
        late = [n for n in numbers if n not in pieces and self.slots[n].num_waiting > MOST_BEHIND]
        for together in (late, *([n] for n in pieces)):
            if together:
                self.extend(take_pairs(together, [self.slots[n] for n in together], num_left=1))

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
        return self.grow_tree(self.config, root, round_.forward, None)

    def start(self, begin: Begin) -> tuple[Root, Round]:
        round_ = self.new_round(self, begin.pairs, self.extend(begin.pairs), begin.noise_RDV)
        return Root(begin.roots_R, round_.root_offers()), round_

    def noise(self, roots: Roots) -> Tensor | None:
        """What the tokens of this round will be drawn with."""
        lengths = [len(history) for history in roots.histories]
        return coming_noise(roots.draws, lengths, self.config.num_steps + 1, self.drafter.target_ids)


def take_pairs(numbers: Sequence[int], slots: Sequence[Slot], num_left: int = 0) -> Pairs:
    """The pairs that wait in ``slots``, which are known by ``numbers``, but for the newest ``num_left`` of each.

    They count as committed from now on.
    """
    starts, counts = [s.num_columns for s in slots], [s.num_waiting - num_left for s in slots]
    tokens, taps = [torch.cat(s.tokens) for s in slots], [torch.cat(s.taps) for s in slots]
    table_R3 = upload(list(zip(numbers, starts, counts, strict=True)), tokens[0].device)
    slots_R, start_R, counts_R = table_R3.unbind(1)
    tokens_RE = pad_sequence([t[:n] for t, n in zip(tokens, counts, strict=True)], batch_first=True)
    taps_RELH = pad_sequence([t[:n] for t, n in zip(taps, counts, strict=True)], batch_first=True)
    for slot, count, token_E, taps_ELH in zip(slots, counts, tokens, taps, strict=True):
        slot.num_columns += count
        # Not views, which would keep those before them.
        slot.tokens, slot.taps = [token_E[count:].clone()] * num_left, [taps_ELH[count:].clone()] * num_left
    width, length = max(starts) + max(counts), max(s.num_columns for s in slots)
    return Pairs(tuple(numbers), slots_R, tokens_RE, taps_RELH, start_R, counts_R, width, length)
