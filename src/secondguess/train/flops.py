"""Multiplications and additions of training, from shapes alone, and how many the machine manages at best.

Only matrix products count. T tokens of a response, N rows of an unroll step, S keys that the last of them sees.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator

import torch

from secondguess.config import DrafterConfig

PROBE_SECONDS = 0.2


# Passes of each level over its products: forward, and backward to what they read and to their weights.
PASSES = {"both": (3, 3), "level0": (3, 2), "none": (1, 2)}


def step_flops(
    c: DrafterConfig, responses: Iterable[tuple[int, int]], num_steps: int, rho: float, shared_loss: str = "both"
) -> float:
    """Of a training step over responses of (length, prompt length), the targets' among it.

    ``rho``: the share of rows that get a second look, 0 without level 1, as if each row's target token could be offered
    (of the others none is looked at again, so this is a few percent too much). Recomputed products do not count.
    """
    total = 0.0
    for length, prompt_len in responses:
        target = 2 * length * c.target_hidden_size * c.draft_vocab_size
        levels = forward_flops(c, length, prompt_len, num_steps, rho)
        total += target + sum(n * flops for n, flops in zip(PASSES[shared_loss], levels, strict=True))
    return total


def forward_flops(c: DrafterConfig, length: int, prompt_len: int, num_steps: int, rho: float) -> tuple[float, float]:
    """Of one response through the unrolled drafter: of level 0 and of level 1."""
    attended, below = c.num_attention_heads * c.head_dim, c.num_layers - 1
    # The first layer reads embedding and feature, the others one stream.
    project = 2 * c.hidden_size * (c.num_layers + 1) * (attended + 2 * c.num_key_value_heads * c.head_dim)
    finish = 2 * attended * c.hidden_size + 2 * 3 * c.hidden_size * c.intermediate_size  # of one layer
    fuse = 2 * c.num_taps * c.target_hidden_size * c.hidden_size
    head = 2 * c.hidden_size * c.draft_vocab_size
    lens = 2 * c.hidden_size * 2 * c.hidden_size if c.lens else 0
    # At step 0: features, their keys in every layer, and all but the last layer to the end.
    lower_layers = below * (finish + 4 * attended * length)
    level0, level1 = length * (fuse + project + lower_layers), 0.0
    for j, (rows, keys) in enumerate(unrolled(length, prompt_len, num_steps)):
        last = finish + 4 * attended * keys
        look = project + c.num_layers * last + head
        level0 += rows * (look if j else last + head)
        level1 += rho * rows * (look + lens)
    return level0, level1


def unrolled(length: int, prompt_len: int, num_steps: int) -> Iterator[tuple[int, int]]:
    """Rows and step-0 keys (N, S) of each unroll step of a response, see ``unroll``."""
    for j in range(min(num_steps, length - 1 - prompt_len)):
        yield length - 1 - prompt_len - j, length - 2 - j


@functools.cache
def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of a few large matrix products."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, generator=torch.Generator(device).manual_seed(0), dtype=dtype, device=device)
    best, end = float("inf"), time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
