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
from secondguess.engine.speculate import Accepted, Roots
from secondguess.kernels.grow import grower
from secondguess.tree.rows import Root
from secondguess.types import DraftTree, Rows, Verdict

MOST_BEHIND = 128  # tokens that a draft may have to read first, where others were decoded plainly


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

    def accept(self, accepted: list[Accepted]) -> None:
        self.catch_up([a.slot for a in accepted if a.slot in self.slots])
        for a in accepted:
            slot = self.slots.get(a.slot)
            if slot is None:
                self.slots[a.slot] = self.read_prompt(a)
            else:
                slot.tokens.append(a.tokens)
                slot.taps.append(a.taps_ELH)

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
        behind = [n for n in numbers if self.slots[n].num_waiting >= MOST_BEHIND]
        if behind:
            self.extend(take_pairs(behind, [self.slots[n] for n in behind]))

    @torch.inference_mode()
    def read_prompt(self, a: Accepted) -> Slot:
        """Extend over all pairs but the newest, which is left to the first draft: there prompts of all lengths meet."""
        slot = Slot(0, [a.tokens[:-1]], [a.taps_ELH[:-1]])
        if slot.num_waiting:
            self.extend(take_pairs([a.slot], [slot]))
        return Slot(slot.num_columns, [a.tokens[-1:]], [a.taps_ELH[-1:].clone()])  # the prompt's are let go

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


def take_pairs(numbers: Sequence[int], slots: Sequence[Slot]) -> Pairs:
    """The pairs that wait in ``slots``, which are known by ``numbers``. They count as committed from now on."""
    starts, counts = [s.num_columns for s in slots], [s.num_waiting for s in slots]
    table_R3 = upload(list(zip(numbers, starts, counts, strict=True)), slots[0].tokens[0].device)
    slots_R, start_R, counts_R = table_R3.unbind(1)
    tokens_RE = pad_sequence([torch.cat(s.tokens) for s in slots], batch_first=True)
    taps_RELH = pad_sequence([torch.cat(s.taps) for s in slots], batch_first=True)
    for slot, count in zip(slots, counts, strict=True):
        slot.num_columns += count
        slot.tokens, slot.taps = [], []
    width, length = max(starts) + max(counts), max(s.num_columns for s in slots)
    return Pairs(tuple(numbers), slots_R, tokens_RE, taps_RELH, start_R, counts_R, width, length)
