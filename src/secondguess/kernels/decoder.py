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
from secondguess.kernels.build import library
from secondguess.kernels.linear import CompactLinear
from secondguess.target.attention import within_window
from secondguess.types import Rows

MOST_VECTORS = 32  # as in ``decoder.c``
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm", "hidden_norm")
PRODUCTS = ("qkv", "o", "gate_up", "down")


class Weights(ctypes.Structure):
    """``struct weights``"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("form", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
    )

    @classmethod
    def of(cls, linear: CompactLinear) -> Weights:
        outputs, inputs = linear.shape
        return cls(linear.code, inputs, outputs, linear.packed.data_ptr(), address(linear.bias))


class LayerStruct(ctypes.Structure):
    """``struct layer``"""

    _fields_ = (
        *((name, Weights) for name in PRODUCTS),
        *((name, ctypes.c_void_p) for name in NORMS),
        ("eps", ctypes.c_float),
    )


class PassStruct(ctypes.Structure):
    """``struct pass``"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("R", "N", "H", "A", "G", "D", "I", "C", "W")),
        *((name, ctypes.c_void_p) for name in ("slots", "columns", "cos", "sin", "x", "e", "scratch")),
        ("scale", ctypes.c_float),
    )


class PlaceStruct(ctypes.Structure):
    """``struct place``"""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("k", "v", "visible", "tap"))


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
        struct = LayerStruct(*map(Weights.of, packed), *map(address, norms), eps)
        sizes = {"A": num_heads[0], "G": num_heads[1], "D": head_dim, "I": packed[3].shape[1]}
        return cls(struct, (*packed, *norms), sizes, window)


def run_layers(
    layers: Sequence[CompiledLayer],
    x_RNH: Tensor,
    rotation: tuple[Tensor, Tensor],
    rows: Rows,
    cache: SlotCache,
    e_RNH: Tensor | None = None,
    taps: Mapping[int, Tensor] = MappingProxyType({}),
) -> None:
    """Turn ``x_RNH`` (float32, contiguous) into the output of the last layer, in place; K/V go to ``cache``.

    ``rotation``: cos and sin [R, N, D], the sine's first half negated. ``e_RNH``: see ``hidden_norm`` in ``decoder.c``.
    ``taps`` [R, N, H] take the inputs of the layers of these numbers.
    """
    lib, sizes, (r, n, h) = library(), layers[0].sizes, x_RNH.shape
    read = {  # bound until the last layer has run
        "slots": rows.slots_R.contiguous(),
        "columns": rows.columns_RN.contiguous(),
        "cos": rotation[0].contiguous(),
        "sin": rotation[1].contiguous(),
        "x": x_RNH,
        "scratch": torch.empty(lib.scratch_size(r * n, h, *sizes.values())),
    } | ({} if e_RNH is None else {"e": e_RNH.contiguous()})
    masks = {window: within_window(rows, window).contiguous() for window in {layer.window for layer in layers}}
    visible = {window: mask.data_ptr() for window, mask in masks.items()}
    shape = {"R": r, "N": n, "H": h, "C": cache.num_columns, "W": rows.visible_RNW.shape[2]}
    task = PassStruct(**shape, **sizes, **{k: t.data_ptr() for k, t in read.items()}, scale=sizes["D"] ** -0.5)
    pointers = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
    places = (PlaceStruct * len(layers))(
        *((*cache.addresses[i], visible[layer.window], address(taps.get(i))) for i, layer in enumerate(layers))
    )
    lib.run_layers(pointers, places, len(layers), ctypes.byref(task))


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def whole_vectors(head_dim: int, intermediate_size: int) -> bool:
    """Whether these sizes fill the compiled code's vectors. Raises BuildError where it cannot be compiled."""
    lanes = library().lanes()
    return head_dim % lanes == 0 and intermediate_size % lanes == 0 and head_dim <= lanes * MOST_VECTORS
