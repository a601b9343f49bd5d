"""How long the parts of a cycle take."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import torch


class Clock:
    """Borders between parts of one cycle, told with ``mark``. ``parts`` is asked once the last one's work is done.

    A GPU works behind the host, so there the parts are timed by what it says, and no border waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = perf_counter()
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append(event)

    def parts(self) -> list[float]:
        """Seconds between neighbouring marks, and from the last one until now."""
        total = perf_counter() - self.started
        spans = [between(a, b) for a, b in pairwise(self._marks)]
        return [*spans, max(0.0, total - sum(spans))]


def between(a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
    if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
        return a.elapsed_time(b) / 1000
    assert isinstance(a, float)
    assert isinstance(b, float)
    return b - a
