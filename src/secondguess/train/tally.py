"""What training steps came to, in numbers that add up.

While steps run they stay on the device, float64 ``sums_TF``: T unroll steps, F numbers of each, in the order of the
fields of ``Tally``, which is how they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over trained rows, per unroll step; level 1's are over the rows that got a second look."""

    rows: list[float] = field(default_factory=list)
    loss0: list[float] = field(default_factory=list)
    right0: list[float] = field(default_factory=list)
    looked: list[float] = field(default_factory=list)
    loss1: list[float] = field(default_factory=list)
    right1: list[float] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)  # level 0 right, level 1 wrong
    mended: list[float] = field(default_factory=list)  # level 0 wrong, level 1 right
    drift: list[float] = field(default_factory=list)  # of level 0 from an anchor

    @classmethod
    def of(cls, sums_TF: Tensor) -> Tally:
        """Unroll steps behind the last that had a row are left out."""
        steps = sums_TF.tolist()
        while steps and not steps[-1][0]:
            steps.pop()
        return cls(*map(list, zip(*steps, strict=True)))

    def sums(self, num_steps: int) -> Tensor:
        """What it is ``of``, with so many unroll steps; numbers that it lacks are 0."""
        sums_TF = nothing(num_steps)
        for f, name in enumerate(NAMES):
            values = getattr(self, name)
            sums_TF[: len(values), f] = torch.tensor(values, dtype=sums_TF.dtype)
        return sums_TF

    def summary(self) -> dict[str, list[float]]:
        """Means per unroll step."""
        out = {"loss0": ratio(self.loss0, self.rows), "top1_0": ratio(self.right0, self.rows)}
        if any(self.drift):
            out["drift"] = ratio(self.drift, self.rows)
        if any(self.looked):
            wrong0 = [n - r for n, r in zip(self.looked, self.right0_looked(), strict=True)]
            out |= {
                "loss1": ratio(self.loss1, self.looked),
                "top1_1": ratio(self.right1, self.looked),
                "top1_0_looked": ratio(self.right0_looked(), self.looked),
                "recovered": ratio(self.mended, wrong0),
                "broken": ratio(self.broken, self.right0_looked()),
            }
        return out

    def right0_looked(self) -> list[float]:
        return [r1 - m + b for r1, m, b in zip(self.right1, self.mended, self.broken, strict=True)]


NAMES = tuple(f.name for f in fields(Tally))


def nothing(num_steps: int, device: torch.device | str = "cpu") -> Tensor:
    """``sums_TF`` of no rows."""
    return torch.zeros(num_steps, len(NAMES), dtype=torch.float64, device=device)


def ratio(numerators: list[float], denominators: list[float]) -> list[float]:
    return [round(n / max(d, 1), 5) for n, d in zip(numerators, denominators, strict=True)]
