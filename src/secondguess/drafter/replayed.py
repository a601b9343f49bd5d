"""A whole draft as one CUDA graph: the extend pass, every step with the tree's bookkeeping, and the final cut.

A draft's thousand small kernels take a GPU less time than they take Python to ask for. Row b of a graph is slot b; a
slot that takes no part is drafted for past its own columns, where nothing is committed.

R requests, E new pairs; B slots of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.config import TreeConfig
from secondguess.device import upload
from secondguess.drafter.model import Drafter
from secondguess.drafter.passes import Pairs
from secondguess.drafter.speculator import Begin, EagleSpeculator
from secondguess.engine.graphs import Replays, bucket
from secondguess.engine.speculate import Roots
from secondguess.types import DraftTree

FEW_COLUMNS = 256


class Shape(NamedTuple):
    num_slots: int  # B
    num_taps: int
    num_columns: int  # looked at before the round's own
    coupled: bool


class ReplayedSpeculator(EagleSpeculator):
    """Drafts what ``EagleSpeculator`` drafts. ``config`` must be one that ``is_static``."""

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int) -> None:
        super().__init__(drafter, config, num_slots, num_columns)
        self._replays = Replays()

    @torch.inference_mode()
    def draft(self, roots: Roots) -> DraftTree:
        begin = self.prepare(roots)
        if begin.pairs.tokens_RE.shape[1] > self.most_pairs:  # more than one cycle can accept
            return self.grow(begin)
        shape = self._shape(begin)
        found = self._replays(shape, self._work(shape), *self._lay(begin, shape))
        slots_R = begin.pairs.slots_R  # indexing copies, so a trace may be kept
        tokens_RN, parents_RN, depths_RN, levels_RN, scores_RN, valid_RN = (x_BN[slots_R] for x_BN in found)
        deepest = self.config.num_steps
        return DraftTree(tokens_RN, parents_RN, depths_RN, levels_RN, scores_RN, valid_RN, deepest=deepest)

    @property
    def most_pairs(self) -> int:
        """E of every graph: the longest path and the bonus token."""
        return self.config.num_steps + 1

    def _shape(self, begin: Begin) -> Shape:
        pairs, config = begin.pairs, self.config
        round_columns = (config.num_steps - 1) * config.rows_per_step
        return Shape(
            num_slots=bucket(max(pairs.slots) + 1, 1, self.cache.num_slots),
            num_taps=pairs.taps_RELH.shape[2],
            num_columns=bucket(pairs.length + self.most_pairs, FEW_COLUMNS, self.cache.num_columns - round_columns),
            coupled=begin.noise_RDV is not None,
        )

    def _lay(self, begin: Begin, shape: Shape) -> list[Tensor]:
        pairs, b, e = begin.pairs, shape.num_slots, self.most_pairs
        slots_R, count = pairs.slots_R, pairs.tokens_RE.shape[1]
        ends = [self.slots[slot].num_columns if slot in self.slots else 0 for slot in range(b)]
        start_B = upload(ends, slots_R.device).index_copy(0, slots_R, pairs.start_R)
        counts_B = torch.ones_like(start_B).index_copy(0, slots_R, pairs.counts_R)
        roots_B = torch.zeros_like(start_B).index_copy(0, slots_R, begin.roots_R)
        tokens_BE = pairs.tokens_RE.new_zeros(b, e)
        tokens_BE[slots_R, :count] = pairs.tokens_RE
        taps_BELH = pairs.taps_RELH.new_zeros(b, e, *pairs.taps_RELH.shape[2:])
        taps_BELH[slots_R, :count] = pairs.taps_RELH
        laid = [tokens_BE, taps_BELH, start_B, counts_B, roots_B]
        if begin.noise_RDV is not None:
            noise_BDV = begin.noise_RDV.new_zeros(b, *begin.noise_RDV.shape[1:])
            laid.append(noise_BDV.index_copy(0, slots_R, begin.noise_RDV))
        return laid

    def _work(self, shape: Shape) -> Callable[..., tuple[Tensor, ...]]:
        slots, width = tuple(range(shape.num_slots)), shape.num_columns

        def work(
            tokens_BE: Tensor, taps_BELH: Tensor, start_B: Tensor, counts_B: Tensor, roots_B: Tensor, *noise: Tensor
        ) -> tuple[Tensor, ...]:
            slots_B = torch.arange(shape.num_slots, device=start_B.device)
            pairs = Pairs(slots, slots_B, tokens_BE, taps_BELH, start_B, counts_B, width, width)
            t = self.grow(Begin(pairs, roots_B, noise[0] if noise else None))
            return t.tokens_RN, t.parents_RN, t.depths_RN, t.levels_RN, t.scores_RN, t.valid_RN

        return work


def is_static(config: TreeConfig) -> bool:
    """Whether a draft's shapes are the same whatever is drafted."""
    return config.reconsider.reconsider_cap is None and config.reconsider.pool == "prev_batch"
