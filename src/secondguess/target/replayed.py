"""A target's pass over the rows of a cycle as a CUDA graph. Rows are laid into few shapes, so that few graphs do.

Row b of a graph is slot b of the cache, and K/V are read where they lie. Padding writes to the last column of the
cache, which nobody sees: ``SPARE``. A slot that does not take part is padding as a whole.

R requests, N rows, W columns of ``Rows``; B slots, M rows of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from secondguess.engine.graphs import Replays, bucket
from secondguess.engine.slots import SlotCache
from secondguess.types import Rows, TargetOut

SPARE = 1  # columns that a cache has more
MOST_ROWS = 256  # of one request: longer ones are prompts, of all lengths
FEW_ROWS = 8  # row counts are multiples of that, but for lone rows
FEW_COLUMNS = 256

Forward = Callable[[Rows, SlotCache], TargetOut]


class Shape(NamedTuple):
    num_slots: int  # B
    num_rows: int  # M
    num_columns: int


class ReplayedForward:
    """``forward``, replayed. What it returns holds until the next call with the same cache."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._replays: WeakKeyDictionary[SlotCache, Replays] = WeakKeyDictionary()

    def takes(self, rows: Rows) -> bool:
        return rows.slots is not None and rows.tokens_RN.shape[1] <= MOST_ROWS

    def __call__(self, rows: Rows, cache: SlotCache, num_taps: int) -> TargetOut:
        """``num_taps``: a model that taps more layers than when a graph was recorded needs another one."""
        assert rows.slots is not None
        shape = shape_for(rows.slots, rows.visible_RNW.shape[1:], cache)
        if cache not in self._replays:
            self._replays[cache] = Replays()
        work, laid = self._work(shape, cache), lay(rows, shape, cache.num_columns - SPARE)
        found = self._replays[cache]((shape, num_taps), work, *laid)
        return TargetOut(*(pick(x_BM, rows) for x_BM in found))

    def _work(self, shape: Shape, cache: SlotCache) -> Callable[..., tuple[Tensor, ...]]:
        def work(
            tokens_BM: Tensor, positions_BM: Tensor, columns_BM: Tensor, visible_BMW: Tensor, places_BW: Tensor
        ) -> tuple[Tensor, ...]:
            slots_B = torch.arange(shape.num_slots, device=tokens_BM.device)
            slots = tuple(range(shape.num_slots))
            rows = Rows(slots_B, tokens_BM, positions_BM, columns_BM, visible_BMW, places_BW, slots)
            out = self._forward(rows, cache)
            return out.hidden_RNH, out.taps_RNLH, out.logits_RNV

        return work


def shape_for(slots: tuple[int, ...], rows_and_columns: tuple[int, ...], cache: SlotCache) -> Shape:
    n, w = rows_and_columns
    return Shape(
        num_slots=bucket(max(slots) + 1, 1, cache.num_slots),
        num_rows=n if n == 1 else -(-n // FEW_ROWS) * FEW_ROWS,
        num_columns=bucket(w, FEW_COLUMNS, cache.num_columns),
    )


def lay(rows: Rows, shape: Shape, spare_column: int) -> tuple[Tensor, ...]:
    """The tensors of ``rows`` in a graph's shape. Padding sees column 0: who sees nothing gets no numbers."""
    (b, m, w), n = shape, rows.tokens_RN.shape[1]
    by_row_RN = torch.stack((rows.tokens_RN, rows.positions_RN, rows.columns_RN), -1)
    by_row_BM = by_row_RN.new_zeros(b, m, 3)
    by_row_BM[..., 2] = spare_column
    by_row_BM[rows.slots_R, :n] = by_row_RN
    visible_BMW = rows.visible_RNW.new_zeros(b, m, w)
    visible_BMW[..., 0] = True
    visible_BMW[rows.slots_R, :n] = pad(rows.visible_RNW, (0, w - rows.visible_RNW.shape[2]))
    places_BW = rows.column_positions_RW.new_zeros(b, w)
    places_BW[rows.slots_R, : rows.column_positions_RW.shape[1]] = rows.column_positions_RW
    return (*by_row_BM.unbind(-1), visible_BMW, places_BW)


def pick(x_BM: Tensor, rows: Rows) -> Tensor:
    """What a graph found for ``rows``: [B, M, ...] -> [R, N, ...]. A view while they fill the first slots."""
    n, slots = rows.tokens_RN.shape[1], rows.slots
    x_RM = x_BM[: len(slots)] if slots == tuple(range(len(slots or ()))) else x_BM[rows.slots_R]
    return x_RM[:, :n]
