"""Attention on the CPU whose rows are the same bits whatever else is computed with them.

In float32 a row of the result does not depend on how many rows or requests there are, on masked columns, or on which
columns hold the tokens it sees. So verifying a tree gives exactly what plain decoding gives. The blocks of
``scaled_dot_product_attention`` follow the shape; it takes 0.7 of the time at 25 rows and 0.4 at one, where attention
is a small part of a pass. What this rests on is how the matrix product adds: one column after the other, as long as it
adds at most ~192 columns and the matrices are not tiny; ``tests/test_stable.py`` says whether this holds on a machine.
If it does not, results are as good as any, only not the same bits.

R requests, H heads, G K/V heads, N rows, W columns, D head dimension, B = R * G, M = H / G * N.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # positions summed together; with the columns of a tree, up to 64 (budget 63), no more than 192
CHUNK = 256  # rows at once, so that a long prompt's scores stay small
# Smaller matrices take other code in the matrix product, so they are padded.
MIN_M, MIN_MD, MIN_BM, MIN_COLUMNS = 4, 200, 12, 16


@dataclass(frozen=True, slots=True)
class Span:
    """Columns [start, stop), where one block of positions lies; ``mine_R1W`` marks its own if they are mixed."""

    start: int
    stop: int
    mine_R1W: Tensor | None


def position_spans(visible_RNW: Tensor, column_positions_RW: Tensor) -> tuple[Span, ...]:
    """Columns by blocks of positions, so that the sum is split where plain decoding splits it.

    Drafts end up in other columns than plain decoding would use, but at the same positions.
    """
    seen_RW = visible_RNW.any(1)
    block_RW = torch.where(seen_RW, column_positions_RW // BLOCK, -1)
    spans = []
    for block in range(int(block_RW.max()) + 1):
        mine_RW = block_RW == block
        columns = mine_RW.any(0).nonzero()
        if len(columns) == 0:  # a sliding window has left it behind
            continue
        start, stop = int(columns[0]), int(columns[-1]) + 1
        mine_RW, other_RW = mine_RW[:, start:stop], seen_RW[:, start:stop] & ~mine_RW[:, start:stop]
        spans.append(Span(start, stop, mine_RW[:, None] if other_RW.any() else None))
    return tuple(spans)


class StableAttention:
    """Attention for the rows of one forward pass; call it once per layer."""

    def __init__(self, visible_RNW: Tensor, column_positions_RW: Tensor, q_RHND: Tensor, g: int) -> None:
        """``q_RHND`` only tells its shape and type. Every row must see a column."""
        (r, h, n, d), w = q_RHND.shape, visible_RNW.shape[2]
        self._spans = position_spans(visible_RNW, column_positions_RW)
        min_m = max(MIN_M, MIN_MD / d, MIN_BM / (r * g))
        self._more_rows = max(0, math.ceil(min_m * g / h) - n)
        self._more_columns = max(0, MIN_COLUMNS - w)
        bias_RNW = torch.zeros(visible_RNW.shape, dtype=q_RHND.dtype).masked_fill_(~visible_RNW, -torch.inf)
        bias_RNW = F.pad(bias_RNW, (0, self._more_columns), value=-torch.inf)
        self._bias_RNW = F.pad(bias_RNW, (0, 0, 0, self._more_rows))

    def __call__(self, q_RHND: Tensor, k_RGWD: Tensor, v_RGWD: Tensor, scale: float) -> Tensor:
        """[R, N, H, D]."""
        n = q_RHND.shape[2]
        if self._more_columns:
            k_RGWD, v_RGWD = (F.pad(x_RGWD, (0, 0, 0, self._more_columns)) for x_RGWD in (k_RGWD, v_RGWD))
        if self._more_rows:
            q_RHND = F.pad(q_RHND, (0, 0, 0, self._more_rows))
        if n <= CHUNK:
            return self._attend(q_RHND, k_RGWD, v_RGWD, self._bias_RNW, scale)[:, :n]
        chunks = -(-n // CHUNK)  # of about equal size, so that none is tiny
        parts = zip(q_RHND.chunk(chunks, 2), self._bias_RNW.chunk(chunks, 1), strict=True)
        return torch.cat([self._attend(q, k_RGWD, v_RGWD, bias, scale) for q, bias in parts], 1)

    def _attend(self, q_RHND: Tensor, k_RGWD: Tensor, v_RGWD: Tensor, bias_RNW: Tensor, scale: float) -> Tensor:
        (r, h, n, d), (g, w) = q_RHND.shape, k_RGWD.shape[1:3]
        k_BWD, v_BWD = k_RGWD.reshape(r * g, w, d), v_RGWD.reshape(r * g, w, d)
        scores_BMW = (q_RHND * scale).reshape(r * g, -1, d) @ k_BWD.mT
        scores_BMW.view(r, h, n, w).add_(bias_RNW[:, None])
        weights_BMW = scores_BMW.sub_(scores_BMW.amax(-1, keepdim=True)).exp_()
        # This sum runs in an order that depends on the columns; in double, its rounding does not.
        total_BM1 = weights_BMW.sum(-1, keepdim=True, dtype=torch.float64).to(q_RHND.dtype)
        out_BMD = self._weighted_sum(weights_BMW, v_BWD).div_(total_BM1)
        return out_BMD.view(r, h, n, d).transpose(1, 2)

    def _weighted_sum(self, weights_BMW: Tensor, v_BWD: Tensor) -> Tensor:
        parts = []
        for span in self._spans:
            part_BMW = weights_BMW[:, :, span.start : span.stop]
            if span.mine_R1W is not None:
                part_BMW = part_BMW * span.mine_R1W.repeat_interleave(len(v_BWD) // len(span.mine_R1W), 0)
            parts.append(part_BMW @ v_BWD[:, span.start : span.stop])
        return functools.reduce(torch.add, parts)
