"""The attention function that transformers models call, over the slot cache.

R requests, H heads, G K/V heads, N rows, W columns, D head dimension.
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
        return FusedAttention(visible_RNW)


def within_window(rows: Rows, window: int | None) -> Tensor:
    """bool [R, N, W]: what rows see in a layer that looks back over ``window`` positions (None: over all)."""
    if window is None:
        return rows.visible_RNW
    # By position, not by column: draft nodes lie in more columns than they have positions.
    distance_RNW = rows.positions_RN[:, :, None] - rows.column_positions_RW[:, None]
    return rows.visible_RNW & (distance_RNW < window)


class FusedAttention:
    """PyTorch's own attention: fast on a GPU and in half precision, rounding depends on the number of rows."""

    def __init__(self, visible_RNW: Tensor) -> None:
        self._visible_R1NW = visible_RNW[:, None]

    def __call__(self, q_RHND: Tensor, k_RGWD: Tensor, v_RGWD: Tensor, scale: float) -> Tensor:
        out_RHND = F.scaled_dot_product_attention(
            q_RHND, k_RGWD, v_RGWD, attn_mask=self._visible_R1NW, scale=scale, enable_gqa=True
        )
        return out_RHND.transpose(1, 2)


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
