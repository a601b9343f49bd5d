"""The drafter's block in compiled code, over a slot cache. ``tests/test_native_drafter.py`` compares both."""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.drafter.model import DecoderLayer, Drafter, Midlayer
from secondguess.engine.slots import SlotCache
from secondguess.kernels.build import BuildError
from secondguess.kernels.decoder import CompiledLayer, run_layers, whole_vectors
from secondguess.target.lean import joined
from secondguess.types import Rows


class NativeBlock:
    """``Drafter.block`` of packed weights. R requests, X rows, H hidden size, D head dimension."""

    def __init__(self, drafter: Drafter, form: str) -> None:
        """``form``: of the weights. Raises BuildError where the code cannot be compiled."""
        self.drafter = drafter
        self.layers = [compiled(layer, drafter, form) for layer in drafter.blocks]

    def __call__(self, cache: SlotCache, rows: Rows, e_RXH: Tensor, g_RXH: Tensor) -> Tensor:
        """Features [R, X, H] of rows with embedding ``e_RXH`` and feature ``g_RXH``."""
        cos_RX1d, sin_RX1d = (turn.to(g_RXH.dtype).squeeze(2) for turn in self.drafter.rotation(rows.positions_RN))
        rotation = torch.cat((cos_RX1d, cos_RX1d), -1), torch.cat((-sin_RX1d, sin_RX1d), -1)
        y_RXH = g_RXH.clone(memory_format=torch.contiguous_format)
        run_layers(self.layers, y_RXH, rotation, rows, cache, e_RXH)
        return self.drafter.feature(y_RXH)


def compiled(layer: DecoderLayer, drafter: Drafter, form: str) -> CompiledLayer:
    attention, mlp, c = layer.self_attn, layer.mlp, drafter.config
    return CompiledLayer.of(
        (
            joined(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj,
            joined(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj,
        ),
        (
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None,
            None,
            layer.hidden_norm.weight if isinstance(layer, Midlayer) else None,
        ),
        form=form,
        eps=c.rms_norm_eps,
        num_heads=(c.num_attention_heads, c.num_key_value_heads),
        head_dim=c.head_dim,
    )


def native_block(drafter: Drafter, form: str) -> NativeBlock | None:
    """None where the code cannot be compiled, or does not take the drafter: sizes that fill no vectors, other norms."""
    c = drafter.config
    try:
        takes = whole_vectors(c.head_dim, c.intermediate_size) and not c.norm_before_residual
        return NativeBlock(drafter, form) if takes else None
    except BuildError:
        return None
