"""Our own forward of Llama-shaped decoders. On the CPU transformers' Python costs a third of a pass, on a GPU its many
small kernels take as long as the matrix products.

The same operations as transformers' modules in fewer calls: q, k and v are one product, gate and up another, and q and
k are rotated together. ``tests/test_lean.py`` compares it with the generic path.

R requests, N rows, H hidden size, A query heads, G K/V heads, D head dimension, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondguess.target.attention import Step
from secondguess.target.linear import can_pack
from secondguess.target.parts import num_parts

Pack = Callable[[nn.Linear], nn.Module]
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight.detach(), module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.itemsize < 4:  # one kernel, in float32 inside
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # In float32 even for float64 rows, as transformers does it.
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; linear layers over the same input are joined."""

    input_norm: Norm
    post_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    num_heads: tuple[int, int]  # A, G
    head_dim: int
    window: int | None

    @classmethod
    def of(cls, layer: Any, pack: Pack) -> Layer:
        attention, mlp, d = layer.self_attn, layer.mlp, layer.self_attn.head_dim
        return cls(
            input_norm=Norm.of(layer.input_layernorm),
            post_norm=Norm.of(layer.post_attention_layernorm),
            q_norm=Norm.of(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=Norm.of(attention.k_norm) if hasattr(attention, "k_norm") else None,
            qkv=pack(joined(attention.q_proj, attention.k_proj, attention.v_proj)),
            o=pack(attention.o_proj),
            gate_up=pack(joined(mlp.gate_proj, mlp.up_proj)),
            down=pack(mlp.down_proj),
            num_heads=(attention.q_proj.out_features // d, attention.k_proj.out_features // d),
            head_dim=d,
            window=getattr(attention, "sliding_window", None),
        )

    def __call__(self, x_RNH: Tensor, rope: tuple[Tensor, Tensor], step: Step, index: int) -> Tensor:
        x_RNH = x_RNH + self.o(self.attend(self.input_norm(x_RNH), rope, step, index))
        gate_RNI, up_RNI = self.gate_up(self.post_norm(x_RNH)).chunk(2, -1)
        return x_RNH + self.down(F.silu(gate_RNI).mul_(up_RNI))

    def attend(self, x_RNH: Tensor, rope: tuple[Tensor, Tensor], step: Step, index: int) -> Tensor:
        a, g = self.num_heads
        heads_RNXD = self.qkv(x_RNH).unflatten(-1, (a + 2 * g, self.head_dim))
        qk_RNXD, v_RNGD = heads_RNXD[:, :, : a + g], heads_RNXD[:, :, a + g :]
        if self.q_norm and self.k_norm:
            qk_RNXD = torch.cat((self.q_norm(qk_RNXD[:, :, :a]), self.k_norm(qk_RNXD[:, :, a:])), 2)
        qk_RXND = rotate(qk_RNXD, *rope).transpose(1, 2)
        k_RGWD, v_RGWD = step.cache.write(index, step.rows, qk_RXND[:, a:], v_RNGD.transpose(1, 2))
        out_RNAD = step.attend(qk_RXND[:, :a], k_RGWD, v_RGWD, self.head_dim**-0.5, self.window)
        return out_RNAD.flatten(2)


class LeanDecoder:
    """Takes a model's layers over; where their weights are packed here, or on a GPU, they are dropped there."""

    def __init__(self, model: Any, pack: Pack) -> None:
        """``pack`` makes what multiplies with a layer's weights."""
        body, self.tap_layers = model.base_model, frozenset[int]()
        self.embedding = body.embed_tokens
        self.rotary = body.rotary_emb
        self.norm = Norm.of(body.norm)
        self.layers = []
        for i, layer in enumerate(body.layers):
            self.layers.append(Layer.of(layer, pack))
            if can_pack(layer) or model.device.type == "cuda":
                body.layers[i] = nn.Identity()

    def tap(self, layers: Iterable[int]) -> None:
        self.tap_layers |= {*layers}

    def __call__(self, step: Step) -> Tensor:
        """The rows' states after the final norm; ``step`` keeps the inputs of the tapped layers."""
        x_RNH = self.embedding(step.rows.tokens_RN)
        rope = signed(*self.rotary(x_RNH, step.rows.positions_RN))
        for i, layer in enumerate(self.layers):
            if i in self.tap_layers:
                step.taps_RNH[i] = x_RNH
            x_RNH = layer(x_RNH, rope, step, i)
        return self.norm(x_RNH)


def fits(model: Any) -> bool:
    """Whether ``LeanDecoder`` computes what the model computes, all of it in this process."""
    suits = model.dtype in (torch.float32, torch.float64) or model.device.type == "cuda"
    known = model.config.model_type in FAMILIES and model.config.hidden_act == "silu"
    theirs = type(model).__module__.startswith("transformers.")  # a model's own code may do anything else
    return suits and known and theirs and num_parts(model) == 1


def joined(*linears: nn.Linear) -> nn.Linear:
    """One layer whose output is that of all, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    one = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None, device="meta")
    one.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        one.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return one


def signed(cos_RND: Tensor, sin_RND: Tensor) -> tuple[Tensor, Tensor]:
    """For ``rotate``: the sine's first half negated, and a dimension for the heads."""
    low, high = sin_RND.chunk(2, -1)
    return cos_RND[:, :, None], torch.cat((-low, high), -1)[:, :, None]


def rotate(x_RNXD: Tensor, cos_RN1D: Tensor, sin_RN1D: Tensor) -> Tensor:
    """Rotary embedding of the half-split kind: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    half = x_RNXD.shape[-1] // 2
    return (x_RNXD * cos_RN1D).addcmul_(x_RNXD.roll(half, -1), sin_RN1D)
