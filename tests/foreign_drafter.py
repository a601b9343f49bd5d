"""EAGLE-3 drafters as other trainers write them, and what they compute, from the description of the formats alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYER = {"eagle3": "midlayer", "speculators": "layers.0"}
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 48
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


def write_foreign(
    folder: Path,
    form: str,
    flags: dict[str, bool],
    own: bool = False,
    hidden: int = 32,
    target_hidden: int = 32,
    vocab: int = 64,
    draft: int = 32,
    seed: int = 0,
) -> Path:
    """A random drafter for a target of ``target_hidden``; ``own``: with an embedding of its own."""
    config, tensors = foreign_config(form, flags, hidden, vocab, draft), {}
    g = torch.Generator().manual_seed(seed)
    for name, shape in shapes(LAYER[form], flags, hidden, target_hidden, draft).items():
        scale = 1.0 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        tensors[name] = scale * torch.randn(shape, generator=g) + (len(shape) == 1)
    if own:
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=g)
    ids = torch.randperm(vocab, generator=g)[:draft].sort().values
    tensors["d2t"] = ids - torch.arange(draft)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def foreign_config(form: str, flags: dict[str, bool], hidden: int, vocab: int, draft: int) -> dict[str, Any]:
    layer = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "vocab_size": vocab, "max_position_embeddings": 2048, "rope_theta": 5000.0,
    }  # fmt: skip
    if form == "eagle3":
        # Flags that are off are left out: that is what engines take it for.
        on = {name: True for name, value in flags.items() if value}
        return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft, **layer, **on}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        **flags,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/target"}},
        "transformer_layer_config": layer,
    }


def shapes(layer: str, flags: dict[str, bool], hidden: int, target: int, draft: int) -> dict[str, tuple[int, ...]]:
    norms: dict[str, tuple[int, ...]] = {f"fc_norm.{i}.weight": (target,) for i in range(3)} if flags["fc_norm"] else {}
    norms |= {"input_norm.weight": (3 * target,)} if flags["norm_before_fc"] else {}
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return norms | {
        "fc.weight": (hidden, 3 * target),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.mlp.gate_proj.weight": (INNER, hidden),
        f"{layer}.mlp.up_proj.weight": (INNER, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, INNER),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
    }


def reference(
    config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor, taps_TLH: Tensor, tokens: list[int]
) -> Tensor:
    """Draft logits [rows, V] of a chain: the first T rows are fed by the target's states, the others by the row before.

    Row p reads token p + 1 (``tokens[p]``) and stands at position p. Its own embedding, if it has one, counts.
    """
    w = {name.replace("layers.0.", "midlayer."): tensor.double() for name, tensor in tensors.items()}
    layer = config.get("transformer_layer_config", config)
    on = {name for name in FLAGS if config.get(name)}
    eps, table = layer["rms_norm_eps"], w.get("embed_tokens.weight", embedding.double())

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + eps).sqrt() * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] @ x

    def turned(x: Tensor, position: int) -> Tensor:
        """Heads of [real half, imaginary half]; every pair turns at its own rate."""
        half = HEAD_DIM // 2
        rate = layer["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(rate), position * rate)
        return torch.cat([z.real, z.imag], dim=1)

    keys, values, logits, feature = [], [], [], torch.empty(0)
    for p, token in enumerate(tokens):
        if p < len(taps_TLH):
            states = list(taps_TLH[p])
            if "fc_norm" in on:
                states = [rms(state, f"fc_norm.{i}") for i, state in enumerate(states)]
            joined = torch.cat(states)
            feature = linear(rms(joined, "input_norm") if "norm_before_fc" in on else joined, "fc")
        normed = rms(feature, "midlayer.hidden_norm")
        x = torch.cat([rms(table[token], "midlayer.input_layernorm"), normed])
        q, k, v = (linear(x, f"midlayer.self_attn.{name}_proj").view(-1, HEAD_DIM) for name in "qkv")
        keys.append(turned(k, p))
        values.append(v)
        heads = []
        for head, query in enumerate(turned(q, p)):
            group = head * KV_HEADS // HEADS
            weights = torch.stack([query @ key[group] for key in keys]).mul(HEAD_DIM**-0.5).softmax(0)
            heads.append(weights @ torch.stack([value[group] for value in values]))
        attended = linear(torch.cat(heads), "midlayer.self_attn.o_proj")
        r = (normed if "norm_before_residual" in on else feature) + attended
        m = rms(r, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(m, "midlayer.mlp.gate_proj"))
        y = r + linear(gate * linear(m, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")
        z = rms(y, "norm")
        logits.append(linear(z, "lm_head"))
        feature = z if "norm_output" in on else y
    return torch.stack(logits)
