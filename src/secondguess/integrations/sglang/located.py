"""The drafter's K/V, at the places where SGLang keeps the target's.

R requests, N rows, C or W columns, G K/V heads, D head size; S rows of SGLang's table, P positions, L places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.types import Rows


class LocatedCache:
    """SGLang numbers the places of its K/V, and has a table of each request's. What the drafter keeps of a position has
    the same number. So it stays as long as the target's, and is there for every request that shares the prefix.

    The rows of a draft have no place of SGLang's: scratch of the batch's row, past all places, is theirs.
    """

    def __init__(
        self,
        table_SP: Tensor,
        num_places: int,
        num_scratch: int,
        layer_shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        """``table_SP``: SGLang's ``req_to_token``, which it goes on filling. ``num_scratch``: places of a request."""
        self.table_SP, self.num_places, self.num_scratch = table_SP, num_places, num_scratch
        size = num_places + len(table_SP) * num_scratch  # a batch has no more requests than the table has rows
        # Zeros, not empty: a masked column still meets the probabilities (as 0 * value), and 0 * nan is nan.
        device = table_SP.device
        self.layers = [torch.zeros(2, size, g, d, dtype=dtype, device=device) for g, d in layer_shapes]
        self.lengths_R = torch.zeros(0, dtype=torch.int64, device=device)

    def aim(self, lengths_R: Tensor) -> None:
        """How many columns of each request have a place of SGLang's, in the passes to come."""
        self.lengths_R = lengths_R

    def places(self, slots_R: Tensor, columns_RC: Tensor) -> Tensor:
        """Of columns of requests, [R, C]. Columns past the scratch share its last place: only padding lies there."""
        past_RC = columns_RC - self.lengths_R[:, None]
        settled_RC = self.table_SP[slots_R[:, None], torch.where(past_RC < 0, columns_RC, 0)].long()
        first_R = self.num_places + self.num_scratch * torch.arange(len(slots_R), device=slots_R.device)
        scratch_RC = first_R[:, None] + past_RC.clamp(0, self.num_scratch - 1)
        return torch.where(past_RC < 0, settled_RC, scratch_RC)

    def store(self, layer: int, rows: Rows, k_RGND: Tensor, v_RGND: Tensor) -> None:
        to_RN = self.places(rows.slots_R, rows.columns_RN)
        for store_LGD, new_RGND in zip(self.layers[layer], (k_RGND, v_RGND), strict=True):
            store_LGD[to_RN] = new_RGND.transpose(1, 2)

    def read(self, layer: int, places_RW: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of what lies there, [R, G, W, D] each."""
        k_LGD, v_LGD = self.layers[layer]
        return k_LGD[places_RW].transpose(1, 2), v_LGD[places_RW].transpose(1, 2)

    def bytes_of_place(self, layer: int) -> int:
        return self.layers[layer][:, 0].nbytes
