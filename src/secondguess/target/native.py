"""Llama-shaped decoders in compiled code.

``tests/test_native.py`` compares it with ``lean``, and a row's bits in different batches, trees and columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.kernels.build import BuildError
from secondguess.kernels.decoder import CompiledLayer, run_layers, whole_vectors
from secondguess.kernels.linear import CompactNorm
from secondguess.kernels.workspace import Workspace
from secondguess.target.attention import Step
from secondguess.target.lean import joined, signed


class NativeDecoder:
    """Takes a model's layers over and drops them there. Raises BuildError where the code cannot be compiled."""

    def __init__(self, model: Any, form: str) -> None:
        """``form``: of the weights, see ``kernels.linear.FORMS``."""
        body, self.tap_layers = model.base_model, frozenset[int]()
        self.embedding, self.rotary = body.embed_tokens, body.rotary_emb
        self.norm = CompactNorm(body.norm.weight, body.norm.variance_epsilon)
        self.layers, self.workspace = [], Workspace()
        for i, layer in enumerate(body.layers):
            self.layers.append(compiled(layer, form))
            body.layers[i] = nn.Identity()

    def tap(self, layers: Iterable[int]) -> None:
        self.tap_layers |= {*layers}

    def __call__(self, step: Step) -> Tensor:
        """The rows' states after the final norm; ``step`` keeps the inputs of the tapped layers."""
        x_RNH = self.embedding(step.rows.tokens_RN)
        cos_RN1D, sin_RN1D = signed(*self.rotary(x_RNH, step.rows.positions_RN))
        step.taps_RNH.update((layer, torch.empty_like(x_RNH)) for layer in self.tap_layers)
        rotation = cos_RN1D[:, :, 0], sin_RN1D[:, :, 0]
        run_layers(self.layers, x_RNH, rotation, step.rows, step.cache, self.workspace, taps=step.taps_RNH)
        return self.norm(x_RNH)


def compiled(layer: Any, form: str) -> CompiledLayer:
    """A transformers decoder layer."""
    attention, mlp, d = layer.self_attn, layer.mlp, layer.self_attn.head_dim
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    head_norms = [
        getattr(attention, name).weight if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    ]
    return CompiledLayer.of(
        (
            joined(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj,
            joined(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj,
        ),
        (*(norm.weight for norm in norms), *head_norms, None),
        form=form,
        eps=norms[0].variance_epsilon,
        num_heads=(attention.q_proj.out_features // d, attention.k_proj.out_features // d),
        head_dim=d,
        window=getattr(attention, "sliding_window", None),
    )


def compiles(model: Any) -> bool:
    """Whether there is compiled code for a model that ``lean.fits``: float32, on the CPU, sizes that fill vectors."""
    if model.dtype != torch.float32 or model.device.type != "cpu":
        return False
    heads = {layer.self_attn.head_dim for layer in model.base_model.layers}
    try:
        return all(whole_vectors(head_dim, model.config.intermediate_size) for head_dim in heads)
    except BuildError:
        return False
