"""What a cycle must move at least, and how fast memory moves it.

Weights are read once by every pass, K/V once by the pass that verifies; everything else is small.
"""

from __future__ import annotations

from time import perf_counter

import torch

from secondguess.bench.gpu.models import ModelShape
from secondguess.config import TreeConfig

REPEATS = 8


def target_bytes(s: ModelShape, width: int) -> int:
    """Of all weights that a pass reads, at ``width`` bytes each: all but the embedding."""
    attention = s.hidden_size * s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads)
    layer = attention + 3 * s.hidden_size * s.intermediate_size
    return width * (s.num_layers * layer + s.vocab_size * s.hidden_size)


def draft_bytes(s: ModelShape, width: int, tree: TreeConfig) -> int:
    """Of the drafter's weights in a whole draft: the layer and the head in every forward, ``fc`` in the first."""
    attention = s.hidden_size * s.head_dim * (2 * (s.num_heads + 2 * s.num_kv_heads) + s.num_heads)
    block = attention + 3 * s.hidden_size * s.intermediate_size + s.draft_vocab_size * s.hidden_size
    return width * (tree.num_steps * block + 3 * s.hidden_size**2)


def cache_bytes(s: ModelShape, width: int, num_tokens: int) -> int:
    """Of K and V of so many tokens in all layers."""
    return width * 2 * s.num_layers * s.num_kv_heads * s.head_dim * num_tokens


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second that a copy of ``size`` bytes reads and writes: the fastest of a few."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    goal, times = torch.empty_like(source), []
    for _ in range(REPEATS):
        synchronize(device)
        started = perf_counter()
        goal.copy_(source)
        synchronize(device)
        times.append(perf_counter() - started)
    return 2 * size / min(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
