"""K/V of every request, allocated once.

S slots, R requests of a call, N rows, G K/V heads (may differ by layer), C columns, W the first columns that the rows
look at, D head dimension (may differ by layer).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        """``layer_shapes``: (G, D) of each layer."""
        self.num_slots = num_slots
        self.num_columns = num_columns
        # Zeros, not empty: a masked column still meets the probabilities (as 0 * value), and 0 * nan is nan.
        self._k = [torch.zeros(num_slots, g, num_columns, d, dtype=dtype, device=device) for g, d in layer_shapes]
        self._v = [torch.zeros_like(k) for k in self._k]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self._k, *self._v))

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """All K and V of a layer, [S, G, C, D] each, contiguous."""
        return self._k[layer], self._v[layer]

    def write(self, layer: int, rows: Rows, k_RGND: Tensor, v_RGND: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' K/V, then return the first W columns of the rows' slots, [R, G, W, D] each.

        These are views while the slots are consecutive, so read them before the next write.
        """
        width = rows.visible_RNW.shape[-1]
        slots = _range_of(rows.slots_R)
        read = []
        for store_SGCD, new_RGND in ((self._k[layer], k_RGND), (self._v[layer], v_RGND)):
            # Two index tensors around a slice put the indexed dimensions first: [R, N, G, D].
            store_SGCD[rows.slots_R[:, None], :, rows.columns_RN] = new_RGND.transpose(1, 2)
            read.append(store_SGCD[slots, :, :width])
        return read[0], read[1]

    def compact(self, slots_R: Tensor, source_RN: Tensor, start_R: Tensor, count_R: Tensor) -> None:
        """In every layer move columns ``source_RN[r, :count_R[r]]`` to ``start_R[r], start_R[r] + 1, ...``.

        All int64. The columns may overlap: everything is read before anything is written.
        """
        n = source_RN.shape[1]
        offset_N = torch.arange(n, device=source_RN.device)
        used_RN = offset_N < count_R[:, None]
        r, i = used_RN.nonzero(as_tuple=True)
        slot, source, goal = slots_R[r], source_RN[r, i], start_R[r] + i
        for store_SGCD in (*self._k, *self._v):
            store_SGCD[slot, :, goal] = store_SGCD[slot, :, source]


def _range_of(slots_R: Tensor) -> slice | Tensor:
    """Consecutive slots as a slice, whose read is a view; others stay as they are, and are copied."""
    first, count = int(slots_R[0]), len(slots_R)
    if count == 1 or torch.equal(slots_R, torch.arange(first, first + count, device=slots_R.device)):
        return slice(first, first + count)
    return slots_R
