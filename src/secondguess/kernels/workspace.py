"""Memory that calls of compiled code work in, which allocate nothing themselves."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Workspace(threading.local):
    """Kept from call to call. A thread has its own, since the calls of several may run at once."""

    def __init__(self) -> None:
        self.held: Tensor = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> int:
        """The address of ``size`` bytes of any content, which hold until the next call in this thread."""
        if len(self.held) < size:  # twice as much: texts grow, and what is never touched takes no memory
            self.held = torch.empty(2 * size, dtype=torch.uint8)
        return self.held.data_ptr()
