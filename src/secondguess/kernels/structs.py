"""What the C code and Python both know: its structs as ctypes sees them, and some numbers. ``build`` compares them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from secondguess.tree.candidates import DEPTH_SHIFT, PARENT_SHIFT

GROUP = 32  # inputs that share a scale, as in llama.cpp's Q8_0 and Q4_1
PACK = 8  # inputs in a word of four-bit weights

PRODUCTS = ("qkv", "o", "gate_up", "down")
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm", "hidden_norm")
SIZES = ("A", "G", "D", "I")  # of a layer
CANDIDATES = {
    "keys": torch.int64,
    "logps": torch.float32,
    "scores": torch.float32,
    "holders": torch.int64,
    "fresh": torch.bool,
    "forwarded": torch.bool,
}
WAITING = ("waiting", "waiting_rows", "confidence", "waiting_valid")


def sizes(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class Weights(ctypes.Structure):
    """``struct weights``"""

    _fields_ = (*sizes("form", "inputs", "outputs"), *pointers("packed", "bias"))


class LayerStruct(ctypes.Structure):
    """``struct layer``"""

    _fields_ = (*((name, Weights) for name in PRODUCTS), *pointers(*NORMS), ("eps", ctypes.c_float))


class PassStruct(ctypes.Structure):
    """``struct pass``"""

    _fields_ = (
        *sizes("R", "N", "H", *SIZES, "C", "W"),
        *pointers("slots", "columns", "cos", "sin", "x", "e", "workspace"),
        ("scale", ctypes.c_float),
    )


class PlaceStruct(ctypes.Structure):
    """``struct place``"""

    _fields_ = pointers("k", "v", "visible", "tap")


class DrafterStruct(ctypes.Structure):
    """``struct drafter``"""

    _fields_ = (
        *sizes("H", "V", "count"),
        *pointers("embedding", "norm"),
        ("eps", ctypes.c_float),
        *sizes("norm_output"),
        ("head", Weights),
        ("lens", Weights),
        *pointers("layers", "target_ids"),
    )


class RoundStruct(ctypes.Structure):
    """``struct round``"""

    _fields_ = (
        *sizes("R", "room", "C", "length", *SIZES),
        *pointers("slots", "roots", "features", "cos", "sin", "noise"),
        *sizes("depths"),
        *pointers("query"),
        *sizes("query_ahead"),
        *pointers("places"),
    )


class ForwardStruct(ctypes.Structure):
    """``struct forward``"""

    _fields_ = (
        *sizes("X", "F", "Y", "K"),
        *pointers("tokens", "feature_rows", "depths", "visible"),
        *pointers("offered", "logps", "confidence", "workspace"),
    )


class TableStruct(ctypes.Structure):
    """``struct table``"""

    _fields_ = (
        *sizes("R", "C", "Y", "K", "P", "num_rows", "num_waiting"),
        *pointers(*CANDIDATES, "lineage", "own", *WAITING, "left", "places"),
    )


class RowsStruct(ctypes.Structure):
    """``struct rows``"""

    _fields_ = (*sizes("F", "E", "M"), *pointers("nodes", "tokens", "feature_rows", "depths", "visible", "valid"))


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "weights": Weights,
    "layer": LayerStruct,
    "pass": PassStruct,
    "place": PlaceStruct,
    "drafter": DrafterStruct,
    "round": RoundStruct,
    "forward": ForwardStruct,
    "table": TableStruct,
    "rows": RowsStruct,
}
# By the names under which the C code shows its own.
MIRRORED = {f"size_of_{name}": ctypes.sizeof(struct) for name, struct in STRUCTS.items()} | {
    "group_size": GROUP,
    "pack_size": PACK,
    "depth_shift": DEPTH_SHIFT,
    "parent_shift": PARENT_SHIFT,
}


def address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Where the C code finds a tensor; it takes on trust what is asserted here."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype, f"{tensor.dtype} is read as {dtype}"
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.data_ptr()
