"""Targets and drafters of real shapes with random weights: what a cycle costs does not depend on their values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from secondguess.config import DrafterConfig, SecondLook
from secondguess.drafter.fit import drafter_config
from secondguess.drafter.model import Drafter
from secondguess.target.hf import HFTarget

SPREAD = 10.0  # of a drafter's logits: sure enough of its guesses that trees are as deep as trained ones


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Of a published model, as far as its config decides what a pass costs."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int = 32000


SHAPES = {
    "Llama-3.1-8B": ModelShape(
        family="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    "Qwen3-8B": ModelShape(
        family="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
}
TINY = {
    name: ModelShape(
        family=shape.family,
        hidden_size=64,
        intermediate_size=128,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=512,
        draft_vocab_size=128,
    )
    for name, shape in SHAPES.items()
}


def random_target(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> HFTarget:
    config = AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with device:  # made where it stays: eight billion weights take minutes on a CPU
        return HFTarget(AutoModelForCausalLM.from_config(config, dtype=dtype))


def random_drafter(shape: ModelShape, target: HFTarget) -> Drafter:
    """Layers shaped like the target's, as they are trained."""
    config: DrafterConfig = drafter_config(target.model, shape.draft_vocab_size, second_look=SecondLook())
    torch.manual_seed(1)
    with target.spec.device:
        drafter = Drafter(config, target.embedding, torch.arange(shape.draft_vocab_size))
        drafter = drafter.to(target.spec.dtype).eval().requires_grad_(False)
        for name, weight in drafter.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, (SPREAD if name == "lm_head.weight" else 1.0) * weight.shape[1] ** -0.5)
    return drafter
