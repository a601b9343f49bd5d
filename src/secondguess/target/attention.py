"""The attention function that transformers models call, over the slot cache.

R requests, H heads, G K/V heads, N rows, W columns, D head dimension, M = H / G * N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from secondguess.engine.slots import SlotCache
from secondguess.target.stable import StableAttention
from secondguess.types import Rows

NAME = "secondguess"
CHUNK = 1024  # rows at once, so that a long prompt's mask stays small
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale -> [R, N, H, D]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, handed through the model to every layer as the keyword ``step``.

    What a pass computes lies here and not on the model, so that threads may share a target.
    """

    rows: Rows
    cache: SlotCache
    taps_RNH: dict[int, Tensor] = field(default_factory=dict)  # by layer: its input
    by_window: dict[int | None, Attend] = field(default_factory=dict)

    def attend(self, q_RHND: Tensor, k_RGWD: Tensor, v_RGWD: Tensor, scale: float, window: int | None) -> Tensor:
        if window not in self.by_window:
            self.by_window[window] = self._plan(q_RHND, k_RGWD.shape[1], window)
        return self.by_window[window](q_RHND, k_RGWD, v_RGWD, scale)

    def _plan(self, q_RHND: Tensor, g: int, window: int | None) -> Attend:
        rows, visible_RNW = self.rows, within_window(self.rows, window)
        if q_RHND.device.type == "cpu" and q_RHND.dtype in (torch.float32, torch.float64):
            return StableAttention(visible_RNW, rows.column_positions_RW, q_RHND, g)
        return FusedAttention(visible_RNW, q_RHND, g)


def within_window(rows: Rows, window: int | None) -> Tensor:
    """bool [R, N, W]: what rows see in a layer that looks back over ``window`` positions (None: over all)."""
    if window is None:
        return rows.visible_RNW
    # By position, not by column: draft nodes lie in more columns than they have positions.
    distance_RNW = rows.positions_RN[:, :, None] - rows.column_positions_RW[:, None]
    return rows.visible_RNW & (distance_RNW < window)


class FusedAttention:
    """PyTorch's own attention: fast on a GPU and in half precision, rounding depends on the number of rows.

    Heads that share K/V are taken as more rows of one head, in groups of S = H / G. Told of shared K/V instead, those
    of PyTorch's kernels that take a mask would have K/V repeated for every head.
    """

    def __init__(self, visible_RNW: Tensor, q_RHND: Tensor, g: int) -> None:
        """``q_RHND`` only tells its shape and type."""
        self._visible_RNW, self._group, self._dtype = visible_RNW, q_RHND.shape[1] // g, q_RHND.dtype
        self._whole = self._bias(visible_RNW) if visible_RNW.shape[1] <= CHUNK else None

    def _bias(self, visible_RNW: Tensor) -> Tensor:
        """[R, 1, S N, W], added to the scores; made once for all layers, where a mask would be turned into it anew."""
        bias_RNW = torch.zeros_like(visible_RNW, dtype=self._dtype).masked_fill_(~visible_RNW, -torch.inf)
        return bias_RNW[:, None].repeat(1, 1, self._group, 1)

    def __call__(self, q_RHND: Tensor, k_RGWD: Tensor, v_RGWD: Tensor, scale: float) -> Tensor:
        """[R, N, H, D]."""
        if self._whole is not None:
            return self._attend(q_RHND, k_RGWD, v_RGWD, self._whole, scale)
        parts = zip(q_RHND.split(CHUNK, 2), self._visible_RNW.split(CHUNK, 1), strict=True)
        return torch.cat([self._attend(q, k_RGWD, v_RGWD, self._bias(visible), scale) for q, visible in parts], 1)

    def _attend(self, q_RHND: Tensor, k_RGWD: Tensor, v_RGWD: Tensor, bias_R1MW: Tensor, scale: float) -> Tensor:
        (r, h, n, d), g = q_RHND.shape, k_RGWD.shape[1]
        q_RGMD = q_RHND.reshape(r, g, -1, d)
        out_RGMD = F.scaled_dot_product_attention(q_RGMD, k_RGWD, v_RGWD, attn_mask=bias_R1MW, scale=scale)
        return out_RGMD.reshape(r, h, n, d).transpose(1, 2)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: Step,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers expects of an attention function; masks come from the step, not from the model."""
    k_RGWD, v_RGWD = step.cache.write(module.layer_idx, step.rows, key, value)
    return step.attend(query, k_RGWD, v_RGWD, scaling, sliding_window), None


AttentionInterface.register(NAME, _attention)
