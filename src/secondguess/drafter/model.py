"""The EAGLE-3.1 drafter (arXiv 2605.09992) and the one vector Parallel Reconsideration adds to it (arXiv 2611.05724).

The block M is given without its attention, because training attends to a chain's own diagonal and serving to a tree,
while everything else is the same code. EAGLE-3.1's M is one layer; a second one is the paper's control that spends the
compute of second looks on depth. A feature is what ``block`` returns: it is fed back as it is, and the head reads it
through ``logits``. Where norms stand differs among EAGLE-3 drafters (``DrafterConfig``).

``...`` any leading shape, L tapped layers (3), A query heads, G key/value heads, D head size, H hidden size,
V draft vocabulary. Tensor names are those of the flat EAGLE-3 checkpoint format.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondguess.config import DrafterConfig
from secondguess.drafter.rope import rope_rates
from secondguess.engine.slots import SlotCache
from secondguess.target.fingerprint import embedding_fingerprint
from secondguess.types import Rows

Rotation = tuple[Tensor, Tensor]  # cos and sin, [..., 1, D / 2] each
# Number of a layer, q, k, v of its rows -> what they attend to, [..., A, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Native = Callable[[SlotCache, Rows, Tensor, Tensor], Tensor]


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))  # autocast hands over bfloat16; the sum of squares wants more


class Attention(nn.Module):
    def __init__(self, c: DrafterConfig, width: int) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(width, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama decoder layer: what comes before its attention, and what comes after."""

    def __init__(self, c: DrafterConfig, width: int) -> None:
        """``width`` of what the attention reads."""
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c, width)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def read(self, e: Tensor, y: Tensor) -> Tensor:
        """What the attention reads of the embedding e and the residual stream y, [..., H] each."""
        return self.input_layernorm(y)

    def residual(self, y: Tensor) -> Tensor:
        """What the layer adds to."""
        return y

    def project(self, e: Tensor, y: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [..., A, D], rotated k and v [..., G, D]."""
        attention, x = self.self_attn, self.read(e, y)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (projection(x).unflatten(-1, (-1, attention.head_dim)) for projection in projections)
        cos, sin = (turn.to(q.dtype) for turn in rotation)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, y: Tensor, attended: Tensor) -> Tensor:
        """Residual stream y [..., H], attended [..., A, D] -> residual stream [..., H]."""
        y = y + self.self_attn.o_proj(attended.flatten(-2))
        return y + self.mlp(self.post_attention_layernorm(y))


class Midlayer(DecoderLayer):
    """EAGLE-3's layer: it attends by embedding and feature side by side, and adds to the feature."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c, 2 * c.hidden_size)
        self.hidden_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.norm_before_residual = c.norm_before_residual

    def read(self, e: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(e), self.hidden_norm(y)], dim=-1)

    def residual(self, y: Tensor) -> Tensor:
        return self.hidden_norm(y) if self.norm_before_residual else y


class Drafter(nn.Module):
    """Parameters and row-wise pieces of the drafter.

    The embedding is frozen, and unless ``own_embedding`` it is the target's and never saved. ``target_embedding`` is
    the fingerprint of the target's. ``tap_index`` says which of the states that ``fuse`` is given are this drafter's:
    all three where only EAGLE-3's are tapped, else whoever knows the target sets it (``HFTarget.tap``).
    """

    embedding: Tensor  # [target vocabulary, H]
    target_ids: Tensor  # int64 [V]: target token id of each draft token, ascending

    def __init__(self, config: DrafterConfig, embedding: Tensor, target_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        width, eps = config.target_hidden_size, config.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(config.num_taps))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_taps * width, eps=eps)
        self.fc = nn.Linear(config.num_taps * width, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        more = [DecoderLayer(config, config.hidden_size) for _ in range(1, config.num_layers)]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(more, 1)})
        self.blocks: tuple[DecoderLayer, ...] = (self.midlayer, *more)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.has_self_query:
            self.self_query = nn.Parameter(torch.zeros(config.hidden_size))
        if config.lens:
            self.lens = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.rope_rates = rope_rates(config).to(embedding.device)
        self.target_embedding = embedding_fingerprint(embedding)
        self.answer_start: str | None = None  # what its training's prompts ended with, if that is known
        self.tap_index: tuple[int, ...] = (0, 1, 2) if config.tap_layers is None else ()
        self.native: Native | None = None  # M in compiled code, where there is some: see ``drafter.native``

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        """``.to(dtype)`` must spare the rates: bfloat16 cannot tell position 257 from 256."""
        super()._apply(fn, recurse)
        self.rope_rates = self.rope_rates.to(self.embedding.device)
        return self

    def fuse(self, taps: Tensor) -> Tensor:
        """Feature of a position from the target's tapped states: [..., L, target hidden] -> [..., H]."""
        mine = [taps[..., i, :] for i in self.tap_index]
        if self.config.fc_norm:
            mine = [norm(tap) for norm, tap in zip(self.fc_norm, mine, strict=True)]
        x = torch.cat(mine, dim=-1)
        return self.fc(self.input_norm(x) if self.config.norm_before_fc else x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Target token ids [...] -> [..., H]."""
        return F.embedding(tokens, self.embedding)

    def rotation(self, positions: Tensor) -> Rotation:
        """Of positions [...], for the heads of a row alike; float64."""
        angles = positions[..., None, None] * self.rope_rates
        return angles.cos(), angles.sin()

    def block(self, e: Tensor, g: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """M over rows of embedding e (or what stands for it) and feature g: the next features. [..., H] each.

        ``positions`` [...] are the features' indices (the pair of feature p and token p + 1 sits at p).
        """
        rotation, y = self.rotation(positions), g
        for i, layer in enumerate(self.blocks):
            y = layer.finish(layer.residual(y), attend(i, *layer.project(e, y, rotation)))
        return self.feature(y)

    def feature(self, y: Tensor) -> Tensor:
        """What is fed back, of the last layer's output. [..., H] each."""
        return self.norm(y) if self.config.norm_output else y

    def logits(self, f: Tensor) -> Tensor:
        """Feature [..., H] -> draft logits [..., V]."""
        return self.lm_head(f if self.config.norm_output else self.norm(f))


def full_precision(x: Tensor) -> Tensor:
    """Soft-maxes are taken in float32 at least, whatever the products were computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's RoPE: halves (not pairs) of the last dimension rotate together."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@torch.no_grad()
def initialise(drafter: Drafter, head_rows: Tensor, final_norm_gain: Tensor, seed: int) -> None:
    """Start near the identity, so that M can be applied to its own output from the first step on.

    The head starts as the target's rows with the target's final norm weight folded in (M's own norm stays 1), and the
    block's output projections start small. Without both, a second pass of M starts far from its first.
    """
    start_matrices(drafter, 0.1, torch.Generator().manual_seed(seed), spared="lm_head.weight")
    drafter.lm_head.weight.copy_(head_rows * final_norm_gain)
    start_level1(drafter)


@torch.no_grad()
def start_further(drafter: Drafter, num_known: int, seed: int) -> None:
    """Start the layers after the first ``num_known`` as the identity: they add nothing yet."""
    g = torch.Generator().manual_seed(seed)
    for layer in drafter.blocks[num_known:]:
        start_matrices(layer, 0.0, g)


@torch.no_grad()
def start_matrices(module: nn.Module, share: float, g: torch.Generator, spared: str = "") -> None:
    """Of the usual size, but those that write to the residual stream only a ``share`` of it."""
    for name, p in module.named_parameters():
        if p.dim() == 2 and name != spared:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            p.normal_(0.0, (share if small else 1.0) * p.shape[1] ** -0.5, generator=g)


@torch.no_grad()
def start_level1(drafter: Drafter) -> None:
    """Start what is level 1's own: the lens at zero, so that a second look starts as the paper's.

    The self-query starts at the mean embedding, the most neutral token; zero would be undefined under the input norm.
    """
    if drafter.config.lens:
        drafter.lens.weight.zero_()
    if drafter.config.has_self_query:
        drafter.self_query.copy_(drafter.embedding.mean(dim=0))
