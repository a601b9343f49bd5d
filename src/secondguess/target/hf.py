"""An unmodified transformers causal language model as a target.

R requests, N rows, H hidden size, V vocabulary, L tapped layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from secondguess.engine.slots import SlotCache
from secondguess.errors import UserError
from secondguess.target import attention
from secondguess.target.base import TargetSpec, default_tap_layers
from secondguess.types import Rows, TargetOut

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "smollm3")


class HFTarget:
    """Takes the model over: switches it to our attention and to evaluation, and hooks its tapped layers.

    Raises UserError for a model type outside ``FAMILIES`` (SmolLM and SmolLM2 are ``llama``).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if model.config.model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"model type {model.config.model_type!r} is not supported; supported are {known}")
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.spec = _spec(model)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._taps: dict[int, Tensor] = {}
        model.set_attn_implementation(attention.NAME)
        for layer in self.spec.tap_layers:
            model.base_model.layers[layer].register_forward_pre_hook(self._tap(layer))

    @property
    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def new_cache(self, num_slots: int, num_columns: int) -> SlotCache:
        spec = self.spec
        return SlotCache(num_slots, num_columns, spec.layer_shapes, spec.dtype, spec.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: SlotCache, last_only: bool = False) -> TargetOut:
        step = attention.Step(rows, cache)
        out = self.model.base_model(
            input_ids=rows.tokens_RN, position_ids=rows.positions_RN, use_cache=False, step=step
        )
        hidden_RNH = out.last_hidden_state
        taps_RNLH = torch.stack([self._taps.pop(layer) for layer in self.spec.tap_layers], 2)
        return TargetOut(hidden_RNH, taps_RNLH, self._logits(hidden_RNH[:, -1:] if last_only else hidden_RNH))

    def _logits(self, hidden_RNH: Tensor) -> Tensor:
        logits_RNV = self.model.get_output_embeddings()(hidden_RNH)
        if self._softcap is None:
            return logits_RNV
        return torch.tanh(logits_RNV / self._softcap) * self._softcap

    def _tap(self, layer: int) -> Any:
        def hook(_module: object, args: tuple[Tensor, ...]) -> None:
            self._taps[layer] = args[0]

        return hook


def _spec(model: PreTrainedModel) -> TargetSpec:
    config = model.config
    layers = model.base_model.layers
    return TargetSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(layers),
        context_len=config.max_position_embeddings,
        layer_shapes=tuple((config.num_key_value_heads, layer.self_attn.head_dim) for layer in layers),
        dtype=model.dtype,
        device=model.device,
        eos_token_ids=_eos(model),
        tap_layers=default_tap_layers(len(layers)),
    )


def _eos(model: PreTrainedModel) -> frozenset[int]:
    """Chat models name several end tokens in ``generation_config``, and one in ``config``."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    found = model.config.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
