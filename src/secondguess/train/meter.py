"""What the steps since the last line of the log came to, and how fast they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from secondguess.train.learner import Done
from secondguess.train.tally import Tally


@dataclass(slots=True)
class Window:
    """Sums over steps. Kept with the run's state, so that a line of the log does not depend on interruptions."""

    sums_TF: Tensor | None = None  # float64, see ``tally``
    steps: int = 0
    tokens: float = 0.0  # trained, each counted once
    grad_norm: float = 0.0
    largest_grad_norm: float = 0.0
    level1_grad_norm: float | None = None  # where level 1's own weights are clipped apart
    largest_level1_grad_norm: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0

    def add(self, done: Done, seconds: float, flops: float) -> None:
        self.sums_TF = done.sums_TF if self.sums_TF is None else self.sums_TF.to(done.sums_TF) + done.sums_TF
        self.steps += 1
        self.tokens += done.tokens
        self.grad_norm += done.grad_norm
        self.largest_grad_norm = max(self.largest_grad_norm, done.grad_norm)
        if done.level1_grad_norm is not None:
            self.level1_grad_norm = (self.level1_grad_norm or 0.0) + done.level1_grad_norm
            self.largest_level1_grad_norm = max(self.largest_level1_grad_norm, done.level1_grad_norm)
        self.seconds += seconds
        self.flops += flops

    @classmethod
    def of(cls, state: Mapping[str, Any], num_steps: int) -> Window:
        """From what ``state`` gave, over so many unroll steps."""
        numbers: dict[str, Any] = dict(state)
        tally = Tally(**numbers.pop("tally"))
        numbers.setdefault("tokens", sum(tally.rows[:1]))
        return cls(tally.sums(num_steps), **numbers)

    def state(self) -> dict[str, Any]:
        """Numbers, alone and in lists."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sums_TF"}
        return {"tally": asdict(self.tally), **numbers}

    @property
    def tally(self) -> Tally:
        return Tally() if self.sums_TF is None else Tally.of(self.sums_TF)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        tally = self.tally
        norms = {"grad_norm": self.grad_norm / max(self.steps, 1), "largest_grad_norm": self.largest_grad_norm}
        if self.level1_grad_norm is not None:
            norms["level1_grad_norm"] = self.level1_grad_norm / self.steps
            norms["largest_level1_grad_norm"] = self.largest_level1_grad_norm
        return {
            "train": tally.summary(),
            **{name: round(norm, 5) for name, norm in norms.items()},
            "tokens": self.tokens,
            "rows": sum(tally.rows),
        }

    def speed(self, peak: float) -> dict[str, float]:
        """``peak``: FLOP/s that matrix products reach here, on all processes. Evaluation is not counted."""
        tally = self.tally
        rows = sum(tally.rows) + sum(tally.looked)
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "rows_per_second": round(rows / self.seconds, 1) if self.seconds else 0.0,
            "share_of_peak": round(self.flops / (self.seconds * peak), 4) if self.seconds else 0.0,
        }
