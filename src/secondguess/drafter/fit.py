"""What a new drafter takes from its target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from secondguess.config import DrafterConfig


def drafter_config(model: Any, draft_vocab_size: int, **network: Any) -> DrafterConfig:
    """Layers shaped like the target's. ``network``: what else ``DrafterConfig`` takes, such as ``num_layers``."""
    c = model.config
    return DrafterConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=c.hidden_size,
        target_num_layers=c.num_hidden_layers,
        rope_theta=rope_theta(c.rope_parameters),
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        **network,
    )


def rope_theta(parameters: dict[str, Any]) -> float:
    """Gemma 3 has one base per layer type; the drafter's one layer attends fully."""
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def final_norm_gain(model: Any) -> Tensor:
    """[H] factor of the target's final norm. Gemma stores it less one."""
    weight = model.base_model.norm.weight.detach().float()
    return weight + 1 if model.config.model_type.startswith("gemma") else weight


def head_rows(head_weight: Tensor, target_ids: Tensor) -> Tensor:
    """[V, H] float32 rows of the target's output head for the draft vocabulary."""
    return head_weight[target_ids].detach().float()
