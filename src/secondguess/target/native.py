"""Llama-shaped decoders in compiled code: a layer is one call, and costs little more than its matrix products.

The layers are those of ``lean``. ``tests/test_native.py`` compares both, and a row's bits in different batches.

R requests, N rows, H hidden size, A query heads, G K/V heads, D head dimension, I intermediate size, C columns of a
slot, W columns looked at.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.kernels.build import BuildError, library
from secondguess.kernels.linear import CompactLinear
from secondguess.target.attention import Step, within_window
from secondguess.target.lean import Layer, LeanDecoder, signed

MOST_VECTORS = 32  # as in ``decoder.c``


class Weights(ctypes.Structure):
    """``struct weights``"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("form", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
    )

    @classmethod
    def of(cls, linear: nn.Module) -> Weights:
        assert isinstance(linear, CompactLinear)
        outputs, inputs = linear.shape
        return cls(linear.code, inputs, outputs, linear.packed.data_ptr(), address(linear.bias))


class NativeLayer(ctypes.Structure):
    """``struct layer``"""

    _fields_ = (
        *((name, Weights) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("eps", ctypes.c_float),
    )

    @classmethod
    def of(cls, layer: Layer) -> NativeLayer:
        products = (Weights.of(linear) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
        norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
        return cls(*products, *(address(norm.weight if norm else None) for norm in norms), layer.input_norm.eps)


class NativePass(ctypes.Structure):
    """``struct pass``"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("R", "N", "H", "A", "G", "D", "I", "C", "W")),
        *((name, ctypes.c_void_p) for name in ("slots", "columns", "visible", "cos", "sin", "k", "v", "x", "scratch")),
        ("scale", ctypes.c_float),
    )


class NativeDecoder:
    """As ``LeanDecoder``, whose layers it runs. Raises BuildError where the code cannot be compiled."""

    def __init__(self, model: Any, tap_layers: Collection[int], form: str) -> None:
        lib = library()
        self.lean, self.tap_layers = LeanDecoder(model, tap_layers, partial(CompactLinear, form=form)), tap_layers
        self._run, self._scratch_size = lib.run_layer, lib.scratch_size
        self._layers = [NativeLayer.of(layer) for layer in self.lean.layers]

    def __call__(self, step: Step) -> Tensor:
        """The rows' states after the final norm; ``step`` keeps the inputs of the tapped layers."""
        lean, rows = self.lean, step.rows
        x_RNH = lean.embedding(rows.tokens_RN)
        cos_RN1D, sin_RN1D = signed(*lean.rotary(x_RNH, rows.positions_RN))
        shape = self._shape(x_RNH, step)
        read = {  # kept by name until the last layer has run
            "slots": rows.slots_R.contiguous(),
            "columns": rows.columns_RN.contiguous(),
            "cos": cos_RN1D.contiguous(),
            "sin": sin_RN1D.contiguous(),
            "x": x_RNH,
            "scratch": torch.empty(self._scratch_size(x_RNH[..., 0].numel(), *(shape[n] for n in "HAGDI"))),
        }
        masks = {window: within_window(rows, window).contiguous() for window in {layer.window for layer in lean.layers}}
        native = NativePass(**shape, **{name: t.data_ptr() for name, t in read.items()}, scale=shape["D"] ** -0.5)
        for i, (layer, compiled) in enumerate(zip(lean.layers, self._layers, strict=True)):
            if i in self.tap_layers:
                step.taps_RNH[i] = x_RNH.clone()
            native.k, native.v = map(address, step.cache.stores(i))
            native.visible = address(masks[layer.window])
            self._run(ctypes.byref(compiled), ctypes.byref(native))
        return lean.norm(x_RNH)

    def _shape(self, x_RNH: Tensor, step: Step) -> dict[str, int]:
        layer, (r, n, h) = self.lean.layers[0], x_RNH.shape
        a, g = layer.num_heads
        down = layer.down
        assert isinstance(down, CompactLinear)
        sizes = {"A": a, "G": g, "D": layer.head_dim, "I": down.shape[1]}
        return {"R": r, "N": n, "H": h, **sizes, "C": step.cache.num_columns, "W": step.rows.visible_RNW.shape[2]}


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def compiles(model: Any) -> bool:
    """Whether there is compiled code for a model that ``lean.fits``: float32, and sizes that fill its vectors."""
    try:
        lanes, config = library().lanes(), model.config
    except BuildError as error:
        logging.getLogger(__name__).info("no compiled layers: %s", error)
        return False
    heads = {layer.self_attn.head_dim for layer in model.base_model.layers}
    whole = all(size % lanes == 0 for size in (*heads, config.intermediate_size))
    return whole and model.dtype == torch.float32 and max(heads) <= lanes * MOST_VECTORS
