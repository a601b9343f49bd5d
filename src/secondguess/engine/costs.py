"""What the parts of a cycle cost: curves through measured times, from which a policy predicts.

Rows are those of all requests together. B batch sizes that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds against a size. Lines join what was measured; past the largest size the last one goes on."""

    sizes: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, times: Mapping[int, Sequence[float]]) -> Curve:
        """The shortest of the times of each size: whatever disturbs only adds. None below a smaller size's."""
        sizes = sorted(times)
        return cls(tuple(sizes), tuple(accumulate((min(times[size]) for size in sizes), max)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Curve:
        return cls(tuple(data["sizes"]), tuple(data["seconds"]))

    def at(self, size: ArrayLike) -> np.ndarray:
        x = np.asarray(size, dtype=float)
        return np.interp(x, self.sizes, self.seconds) + self._slope() * np.maximum(x - self.sizes[-1], 0)

    def _slope(self) -> float:
        if len(self.sizes) == 1:
            return 0.0
        return (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])


NOTHING = Curve((1,), (0.0,))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds that a cycle's parts take on one machine with one target and one drafter."""

    batches: tuple[int, ...]  # the batch sizes of ``verify_curves``, ascending
    verify_curves: tuple[Curve, ...]  # against rows: all that follows a draft, nearly all of it the target's pass
    start_curve: Curve  # against requests: a draft without steps, that is the extend pass and cutting the tree
    step_curve: Curve  # against rows: one step of a draft
    context: float = 0.0  # tokens of each request that the curves above were measured with
    context_curve: Curve = NOTHING  # against rows of one request: what each further token adds to its verification

    def verify(self, rows: ArrayLike, requests: int = 1, context: float = 0.0) -> np.ndarray:
        """From the end of the draft to the end of the cycle, where ``rows`` are verified.

        ``context``: tokens before them, of a request on average.
        """
        each_B = [curve.at(rows) for curve in self.verify_curves]
        place = float(np.interp(requests, self.batches, range(len(self.batches))))
        low = int(place)
        high = min(low + 1, len(each_B) - 1)
        near = each_B[low] + (place - low) * (each_B[high] - each_B[low])
        return near + max(context - self.context, 0.0) * self.verify_further(rows, requests)

    def verify_further(self, rows: ArrayLike, requests: int = 1) -> np.ndarray:
        """Seconds that one more token of each request adds: every request's rows attend to its own K/V."""
        return requests * self.context_curve.at(np.asarray(rows) / requests)

    def draft_start(self, requests: int = 1) -> float:
        return float(self.start_curve.at(requests))

    def draft_step(self, rows: int) -> float:
        return float(self.step_curve.at(rows))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """The inverse of ``asdict``, by way of JSON. Raises KeyError or TypeError for anything else."""
        return cls(
            batches=tuple(data["batches"]),
            verify_curves=tuple(map(Curve.from_json, data["verify_curves"])),
            start_curve=Curve.from_json(data["start_curve"]),
            step_curve=Curve.from_json(data["step_curve"]),
            context=data["context"],
            context_curve=Curve.from_json(data["context_curve"]),
        )
