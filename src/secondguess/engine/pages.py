"""Tensors on the CPU that take memory only where something was written, and give it back a part at a time."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
LENT = sys.platform == "linux"  # which hands out memory page by page, and takes it back
NO_RESERVE = 0x4000  # MAP_NORESERVE: more may be set aside than there is memory


def lends(device: torch.device | str) -> bool:
    """Whether a device hands memory out as it fills."""
    return LENT and torch.device(device).type == "cpu"


class Pages:
    """Zeros of any shape, in ``tensor``. On a GPU, and not on Linux, all memory is taken at once and kept."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._map: mmap.mmap | None = None
        if lends(device):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            self._map = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=flags)
            with suppress(OSError):  # a kernel that has no huge pages; where it has, a token would take 2 MiB a head
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
            self.tensor = torch.frombuffer(self._map, dtype=dtype).view(*shape)
        else:
            self.tensor = torch.zeros(*shape, dtype=dtype, device=device)

    @property
    def lent(self) -> bool:
        """Whether memory is taken as it fills, and ``give_back`` does anything."""
        return self._map is not None

    def give_back(self, part: Tensor) -> None:
        """``part`` is a contiguous piece of ``tensor`` that nobody needs: its whole pages are zeros again, and free."""
        if self._map is None:
            return
        start = part.data_ptr() - self.tensor.data_ptr()
        first, end = -(-start // PAGE) * PAGE, (start + part.nbytes) // PAGE * PAGE
        if first < end:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
