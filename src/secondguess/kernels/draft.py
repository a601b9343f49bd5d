"""A round of drafting in compiled code: one call for each forward, with all that it does besides its products.

R requests, X rows of a forward, Y rows of the round so far, H hidden size, D head dimension, V draft vocabulary, K
offers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.engine.slots import SlotCache
from secondguess.kernels.build import library
from secondguess.kernels.decoder import CompiledLayer
from secondguess.kernels.linear import CompactLinear
from secondguess.kernels.structs import DrafterStruct, ForwardStruct, PlaceStruct, RoundStruct, Weights, address
from secondguess.kernels.workspace import Workspace
from secondguess.tree.rows import DraftRows, Offers


@dataclass(frozen=True, slots=True)
class CompiledDrafter:
    """A drafter as the compiled code reads it, and the tensors that it reads."""

    struct: DrafterStruct
    layers: Sequence[CompiledLayer]
    head: CompactLinear
    lens: CompactLinear | None
    kept: tuple[object, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[CompiledLayer],
        *,
        embedding: Tensor,
        norm: Tensor,
        eps: float,
        norm_output: bool,
        head: CompactLinear,
        lens: CompactLinear | None,
        target_ids: Tensor,
    ) -> CompiledDrafter:
        """``norm`` [H], ``target_ids`` int64 [V]; all in float32 but for packed weights."""
        pointers = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
        struct = DrafterStruct(
            H=norm.numel(),
            V=target_ids.numel(),
            count=len(layers),
            embedding=address(embedding),
            norm=address(norm),
            eps=eps,
            norm_output=norm_output,
            head=head.struct(),
            lens=lens.struct() if lens else Weights(),
            layers=ctypes.addressof(pointers),
            target_ids=address(target_ids, torch.int64),
        )
        return cls(struct, layers, head, lens, (pointers, embedding, norm, target_ids))


class CompiledRound:
    """The rows of a round, their features, and where they lie in a slot cache."""

    def __init__(
        self,
        drafter: CompiledDrafter,
        cache: SlotCache,
        f_root_RH: Tensor,
        slots_R: Tensor,
        roots_R: Tensor,
        *,
        length: int,
        room: int,
        rotation: tuple[Tensor, Tensor],
        noise_RDV: Tensor | None,
        query: Tensor | None,
        query_ahead: int,
        workspace: Workspace,
    ) -> None:
        """``roots_R``: the roots' columns, which are their positions, too; ``length``: one more than the last of them.

        ``room``: for so many rows of each request. ``rotation``: cos and sin [positions, D], the sine's first half
        negated. ``query`` [H] stands where second looks would have their token's embedding, ``query_ahead`` positions
        further than their node. All contiguous.
        """
        assert cache.dtype == torch.float32
        self.lib, self.drafter, self.workspace = library(), drafter, workspace
        num_requests, hidden = f_root_RH.shape
        self.features_RYH = torch.empty(num_requests, room, hidden)
        self.features_RYH[:, 0] = f_root_RH
        places = (PlaceStruct * len(drafter.layers))(*cache.addresses)
        self.kept = (slots_R, roots_R, rotation, noise_RDV, query, places)
        self.struct = RoundStruct(
            R=num_requests,
            room=room,
            C=cache.num_columns,
            length=length,
            **drafter.layers[0].sizes,
            slots=address(slots_R, torch.int64),
            roots=address(roots_R, torch.int64),
            features=address(self.features_RYH),
            cos=address(rotation[0]),
            sin=address(rotation[1]),
            noise=address(noise_RDV),
            depths=0 if noise_RDV is None else noise_RDV.shape[1],
            query=address(query),
            query_ahead=query_ahead,
            places=ctypes.addressof(places),
        )

    def root_offers(self, width: int) -> Offers:
        """What the roots offer, ``width`` tokens each."""
        num_requests = self.struct.R
        f_RH, depths_R = self.features_RYH[:, 0].contiguous(), torch.zeros(num_requests, dtype=torch.int64)
        offers = empty_offers(num_requests, 1, width)
        task = ForwardStruct(X=1, F=1, Y=1, K=width, depths=address(depths_R, torch.int64), **written(offers))
        self.lib.draft_offer(*self.with_room(task), address(f_RH))
        return offers

    def forward(self, rows: DraftRows, width: int) -> Offers:
        """What new rows of the round offer, ``width`` tokens each, level 0 and level 1 in one batch."""
        r, x, y = rows.visible_RXY.shape
        numbers = [t.contiguous() for t in (rows.tokens_RX, rows.feature_rows_RX, rows.depths_RX)]
        visible_RXY, offers = rows.visible_RXY.contiguous(), empty_offers(r, x, width)
        read = (*(address(t, torch.int64) for t in numbers), address(visible_RXY, torch.bool))
        task = ForwardStruct(x, rows.num_level0, y, width, *read, **written(offers))
        self.lib.draft_forward(*self.with_room(task))
        return offers

    def with_room(self, task: ForwardStruct) -> tuple[object, object, object]:
        """The drafter, the round, and the task once it has memory to work in."""
        pointers = ctypes.byref(self.drafter.struct), ctypes.byref(self.struct), ctypes.byref(task)
        task.workspace = self.workspace.of(self.lib.draft_room(*pointers))
        return pointers


def written(offers: Offers) -> dict[str, int | None]:
    """Where a forward leaves its offers."""
    return {
        "offered": address(offers.tokens_RXK, torch.int64),
        "logps": address(offers.logps_RXK),
        "confidence": address(offers.confidence_RX),
    }


def empty_offers(num_requests: int, num_rows: int, width: int) -> Offers:
    tokens_RXK = torch.empty(num_requests, num_rows, width, dtype=torch.int64)
    return Offers(tokens_RXK, torch.empty(num_requests, num_rows, width), torch.empty(num_requests, num_rows))
