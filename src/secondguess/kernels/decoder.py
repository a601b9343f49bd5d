"""Decoder layers in compiled code: one call for all, which costs little more than its matrix products.

R requests, N rows, H hidden size, A query heads, G K/V heads, D head dimension, I intermediate size, C columns of a
slot, W columns looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from secondguess.engine.slots import SlotCache
from secondguess.kernels.build import constant, library
from secondguess.kernels.linear import CompactLinear
from secondguess.kernels.structs import LayerStruct, PassStruct, PlaceStruct, address
from secondguess.kernels.workspace import Workspace
from secondguess.target.attention import within_window
from secondguess.types import Rows


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """A layer as the compiled code reads it, and the tensors that it reads."""

    struct: LayerStruct
    kept: tuple[object, ...]
    sizes: dict[str, int]  # A, G, D, I
    window: int | None

    @classmethod
    def of(
        cls,
        products: Sequence[nn.Linear],
        norms: Sequence[Tensor | None],
        *,
        form: str,
        eps: float,
        num_heads: tuple[int, int],
        head_dim: int,
        window: int | None = None,
    ) -> CompiledLayer:
        """``products`` and ``norms`` in the order of PRODUCTS and NORMS; ``form``: of the weights."""
        packed = [CompactLinear(linear, form) for linear in products]
        struct = LayerStruct(*(linear.struct() for linear in packed), *map(address, norms), eps)
        sizes = {"A": num_heads[0], "G": num_heads[1], "D": head_dim, "I": packed[3].shape[1]}
        return cls(struct, (*packed, *norms), sizes, window)


def run_layers(
    layers: Sequence[CompiledLayer],
    x_RNH: Tensor,
    rotation: tuple[Tensor, Tensor],
    rows: Rows,
    cache: SlotCache,
    workspace: Workspace,
    e_RNH: Tensor | None = None,
    taps: Mapping[int, Tensor] = MappingProxyType({}),
) -> None:
    """Turn ``x_RNH`` (contiguous) into the output of the last layer, in place; K/V go to ``cache``. All in float32.

    ``rotation``: cos and sin [R, N, D], the sine's first half negated. ``e_RNH``: see ``hidden_norm`` in ``decoder.h``.
    ``taps`` [R, N, H] take the inputs of the layers of these numbers.
    """
    assert cache.dtype == torch.float32
    lib, sizes, (r, n, h) = library(), layers[0].sizes, x_RNH.shape
    # Bound until the last layer has run.
    slots_R, columns_RN = rows.slots_R.contiguous(), rows.columns_RN.contiguous()
    cos_RND, sin_RND = (turn.contiguous() for turn in rotation)
    e_RNH = None if e_RNH is None else e_RNH.contiguous()
    masks = {window: within_window(rows, window).contiguous() for window in {layer.window for layer in layers}}
    visible = {window: address(mask, torch.bool) for window, mask in masks.items()}
    shape = {"R": r, "N": n, "H": h, "C": cache.num_columns, "W": rows.visible_RNW.shape[2]}
    task = PassStruct(
        **shape,
        **sizes,
        slots=address(slots_R, torch.int64),
        columns=address(columns_RN, torch.int64),
        cos=address(cos_RND),
        sin=address(sin_RND),
        x=address(x_RNH),
        e=address(e_RNH),
        scale=sizes["D"] ** -0.5,
    )
    task.workspace = workspace.of(lib.layers_room(ctypes.byref(task)))
    pointers = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
    places = (PlaceStruct * len(layers))(
        *((*cache.addresses[i], visible[layer.window], address(taps.get(i))) for i, layer in enumerate(layers))
    )
    lib.run_layers(pointers, places, len(layers), ctypes.byref(task))


def whole_vectors(head_dim: int, intermediate_size: int) -> bool:
    """Whether these sizes fill the compiled code's vectors. Raises BuildError where it cannot be compiled."""
    lanes = constant("lanes")
    return head_dim % lanes == 0 and intermediate_size % lanes == 0 and head_dim <= lanes * constant("most_vectors")
