"""Bytes that training takes: of the GPU if it trains there, else of the machine."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Generator
from pathlib import Path

import torch

from secondguess.machine import number_in

PROCESS = Path("/proc/self")


class Memory:
    """``peak``: what this process took at most. ``step``: what steps took at most, less what was there at the first.

    The system's high-water mark is put back before each step, so that neither loading nor evaluation is taken for a
    step's. Where it cannot be (outside Linux) ``step`` is the process's peak less what was there, which is no less.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.step = device, 0, 0
        self._before: int | None = None

    @contextlib.contextmanager
    def of_a_step(self) -> Generator[None]:
        self.peak = max(self.peak, high_water(self.device))
        if self._before is None:
            self._before = taken(self.device)
        lower_mark(self.device)
        yield
        most = high_water(self.device)
        self.peak, self.step = max(self.peak, most), max(self.step, most - self._before)

    def summary(self) -> dict[str, float]:
        peak = max(self.peak, high_water(self.device))
        return {"peak_memory_gb": round(peak / 1e9, 3), "step_memory_gb": round(self.step / 1e9, 3)}


def high_water(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status("VmHWM:")


def taken(device: torch.device) -> int:
    """Now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status("VmRSS:")


def lower_mark(device: torch.device) -> None:
    """From here on ``high_water`` counts anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def status(name: str) -> int:
    """Of this process; its peak where the system tells no more."""
    try:
        return 1024 * number_in((PROCESS / "status").read_text(), name)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
