"""K/V of every request. Room for all of it is set aside once; memory is taken as it fills.

S slots, R requests of a call, N rows, G K/V heads (may differ by layer), C columns, W the first columns that the rows
look at, D head dimension (may differ by layer), L layers of one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess import device as devices
from secondguess.engine.pages import Pages
from secondguess.types import Rows


class SlotCache:
    """One slot per request, one column per token. Which columns are committed is the engine's business, so rolling
    back a draft is keeping its own length: nothing is erased, stale columns are overwritten before they are seen.
    """

    def __init__(
        self,
        num_slots: int,
        num_columns: int,
        layer_shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """``layer_shapes``: (G, D) of each layer. ``addresses``: of each layer's ``stores``."""
        self.num_slots = num_slots
        self.num_columns = num_columns
        # Zeros, not empty: a masked column still meets the probabilities (as 0 * value), and 0 * nan is nan.
        # One tensor for all layers of a shape, K and V of each: what moves in all of them moves at once.
        self._pages = {
            (g, d): Pages((number, 2, num_slots, g, num_columns, d), dtype, device)
            for (g, d), number in Counter(layer_shapes).items()
        }
        self._stores = {shape: pages.tensor for shape, pages in self._pages.items()}
        rest = {shape: iter(store_L2SGCD) for shape, store_L2SGCD in self._stores.items()}
        pairs = (next(rest[shape]) for shape in layer_shapes)
        self._layers = [(store_2SGCD[0], store_2SGCD[1]) for store_2SGCD in pairs]
        self.addresses = [(k_SGCD.data_ptr(), v_SGCD.data_ptr()) for k_SGCD, v_SGCD in self._layers]

    @property
    def dtype(self) -> torch.dtype:
        return self._layers[0][0].dtype

    @property
    def bytes(self) -> int:
        return sum(store.nbytes for store in self._stores.values())

    @property
    def grows(self) -> bool:
        """Whether memory is taken as the slots fill."""
        return any(pages.lent for pages in self._pages.values())

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """All K and V of a layer, [S, G, C, D] each, contiguous."""
        return self._layers[layer]

    def write(self, layer: int, rows: Rows, k_RGND: Tensor, v_RGND: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' K/V, then return the first W columns of the rows' slots, [R, G, W, D] each.

        These are views while the slots are consecutive, so read them before the next write.
        """
        width = rows.visible_RNW.shape[-1]
        slots = _range_of(rows)
        read = []
        for store_SGCD, new_RGND in zip(self._layers[layer], (k_RGND, v_RGND), strict=True):
            # Two index tensors around a slice put the indexed dimensions first: [R, N, G, D].
            store_SGCD[rows.slots_R[:, None], :, rows.columns_RN] = new_RGND.transpose(1, 2)
            read.append(store_SGCD[slots, :, :width])
        return read[0], read[1]

    def release(self, slot: int) -> None:
        """Nobody needs what the slot holds: on the CPU its memory is free for others."""
        for pages in self._pages.values():
            if pages.lent:
                for store_SGCD in pages.tensor.flatten(0, 1):
                    pages.give_back(store_SGCD[slot])

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first columns of a slot, in every layer."""
        for store_L2SGCD in self._stores.values():
            store_L2SGCD[:, :, goal, :, :count] = store_L2SGCD[:, :, source, :, :count]

    def compact(self, slots_R: Tensor, source_RN: Tensor, start_R: Tensor, count_R: Tensor) -> None:
        """In every layer move columns ``source_RN[r, :count_R[r]]`` to ``start_R[r], start_R[r] + 1, ...``.

        All int64. The columns may overlap: everything is read before anything is written. There must be N columns from
        ``start_R`` on. On the CPU only what moves is touched; on a GPU, where the host would wait to hear what that is,
        all else is copied to where it is, so that no shape depends on it.
        """
        if source_RN.shape[1] == 0:
            return
        offset_N = torch.arange(source_RN.shape[1], device=source_RN.device)
        goal_RN = start_R[:, None] + offset_N
        source_RN = torch.where(offset_N < count_R[:, None], source_RN, goal_RN)
        where = slots_R[:, None].expand_as(goal_RN), source_RN, goal_RN
        if devices.at_hand(source_RN):
            moves_RN = source_RN != goal_RN
            where = tuple(index_RN[moves_RN] for index_RN in where)
        slots, source, goal = where
        if slots.numel():
            for store_L2SGCD in self._stores.values():
                store_L2SGCD[:, :, slots, :, goal] = store_L2SGCD[:, :, slots, :, source]


def _range_of(rows: Rows) -> slice | Tensor:
    """Consecutive slots as a slice, whose read is a view; others stay as they are, and are copied."""
    slots = rows.slots or tuple(rows.slots_R.tolist())
    first, end = slots[0], slots[0] + len(slots)
    return slice(first, end) if slots == tuple(range(first, end)) else rows.slots_R
