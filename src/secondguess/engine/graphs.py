"""CUDA graphs: what a GPU does in a pass, recorded once for each shape and replayed without the host's Python.

A graph reads and writes the memory that it was recorded with. So its arguments are copied into tensors of its own, and
what it returns holds until its next replay. What the recorded function reads besides its arguments (weights, caches)
must stay where it is; numbers that the host knew are recorded as they were, so they belong into the key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]


class Graph:
    """``work`` over tensors like ``args``, on one GPU. ``pool``: of memory that graphs of one kind share."""

    def __init__(self, work: Work, args: Sequence[Tensor], pool: Any) -> None:
        device = args[0].device
        # Not in inference mode, whatever the caller is in: its tensors could not be written to outside of it.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            self._args = [x.clone() for x in args]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries set themselves up in the first call
                work(*self._args)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._results = work(*self._args)

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip(self._args, args, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return self._results


class Replays:
    """Calls of one kind, of which those that come again become graphs.

    Results of one call must be done with at the next, whatever its key: all graphs share their memory.
    """

    def __init__(self) -> None:
        self._pool = new_pool()
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, Graph] = {}

    def __call__(self, key: Hashable, work: Work, *args: Tensor) -> tuple[Tensor, ...]:
        """``work(*args)``. What ``work`` depends on besides ``args`` must be the same whenever ``key`` is."""
        if key in self._graphs:
            return self._graphs[key](*args)
        if key not in self._seen:  # most shapes of a prompt never come again
            self._seen.add(key)
            return work(*args)
        self._graphs[key] = Graph(work, args, self._pool)
        return self._graphs[key](*args)


def new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


def usable(device: torch.device) -> bool:
    """Whether passes on this device are worth recording, and can be."""
    return device.type == "cuda"


def bucket(size: int, least: int, most: int) -> int:
    """The smallest of ``least``, twice that, four times that, ... that holds ``size``; ``most`` at the most."""
    rounded = least
    while rounded < size:
        rounded *= 2
    return min(rounded, most)
