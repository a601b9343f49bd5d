"""Tiny random models for tests: same code paths as the real ones, milliseconds instead of minutes."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from secondguess.config import SecondLook
from secondguess.drafter.fit import drafter_config, final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise
from secondguess.target.hf import HFTarget

_EXTRA = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    "qwen3": {"head_dim": 16},
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "final_logit_softcapping": 3.0,
        "layer_types": None,
    },
}


def tiny_target(
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 8,
    tie: bool = True,
    form: str = "float32",
    device: str = "cpu",
) -> HFTarget:
    """A random ``llama``, ``qwen2``, ``qwen3`` or ``gemma3`` model, 4 heads, 2 K/V heads, no tokenizer.

    ``qwen2`` and ``gemma3`` have sliding windows of 8 positions in some layers. Token 0 ends a text.
    """
    config = AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        **_EXTRA[family],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, weight in model.named_parameters():
            # transformers' own 0.02 would leave the logits flat and every choice a near-tie.
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.5 if "embed" in name else 1.5 / weight.shape[1] ** 0.5)
    return HFTarget(model.to(device), form=form)


def tiny_drafter(
    target: HFTarget,
    seed: int = 0,
    reconsideration: bool = True,
    look: SecondLook | None = None,
    num_layers: int = 1,
    lens: bool = False,
) -> Drafter:
    """A random drafter for a tiny target, with half of its vocabulary, in its dtype.

    ``reconsideration``: as if level 1 had been trained, with second looks of the kind ``look`` (the default kind), and
    with a lens if there is one.
    """
    vocab_size = target.spec.vocab_size
    generator = torch.Generator().manual_seed(seed)
    target_ids = torch.randperm(vocab_size, generator=generator)[: vocab_size // 2].sort().values
    learnt = (look or SecondLook()) if reconsideration else None
    network = {"second_look": learnt, "num_layers": num_layers, "lens": lens}
    shape = drafter_config(target.model, len(target_ids), **network)
    drafter = Drafter(shape, target.embedding, target_ids)
    initialise(drafter, head_rows(target.head_weight, target_ids), final_norm_gain(target.model), seed)
    if lens:
        torch.nn.init.normal_(drafter.lens.weight, std=0.1, generator=generator)
    return drafter.to(target.spec.device, target.spec.dtype).eval().requires_grad_(False)
