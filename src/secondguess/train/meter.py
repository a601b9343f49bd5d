"""What the steps since the last line of the log came to, and how fast they were."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from secondguess.train.learner import Done
from secondguess.train.objective import Tally


@dataclass(slots=True)
class Window:
    """Sums over steps. Kept with the run's state, so that a line of the log does not depend on interruptions."""

    tally: Tally = field(default_factory=Tally)
    steps: int = 0
    grad_norm: float = 0.0
    largest_grad_norm: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0

    def add(self, done: Done, seconds: float, flops: float) -> None:
        self.tally.add(done.tally)
        self.steps += 1
        self.grad_norm += done.grad_norm
        self.largest_grad_norm = max(self.largest_grad_norm, done.grad_norm)
        self.seconds += seconds
        self.flops += flops

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Window:
        """From what ``state`` gave."""
        sums = dict(state)
        return cls(Tally(**sums.pop("tally")), **sums)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def tokens(self) -> float:
        """Trained tokens, each counted once: the rows of the first unroll step."""
        return sum(self.tally.rows[:1])

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "train": self.tally.summary(),
            "grad_norm": round(self.grad_norm / max(self.steps, 1), 5),
            "largest_grad_norm": round(self.largest_grad_norm, 5),
            "tokens": self.tokens,
            "rows": sum(self.tally.rows),
        }

    def speed(self, peak: float, device: torch.device) -> dict[str, float]:
        """``peak``: FLOP/s that matrix products reach here, on all processes. Evaluation is not counted."""
        rows = sum(self.tally.rows) + sum(self.tally.looked)
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "rows_per_second": round(rows / self.seconds, 1) if self.seconds else 0.0,
            "share_of_peak": round(self.flops / (self.seconds * peak), 4) if self.seconds else 0.0,
            "peak_memory_gb": round(peak_memory(device) / 1e9, 3),
        }


def peak_memory(device: torch.device) -> int:
    """Bytes that this process took at most: of the GPU if it trains there, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
