"""What training steps came to, in numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
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

    def append(self, step: Tally) -> None:
        """Put the tally of one more unroll step behind."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(step, name))

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            ours, theirs = getattr(self, name), getattr(other, name)
            ours.extend([0.0] * (len(theirs) - len(ours)))
            for j, value in enumerate(theirs):
                ours[j] += value

    def summary(self) -> dict[str, list[float]]:
        """Means per unroll step."""
        out = {"loss0": ratio(self.loss0, self.rows), "top1_0": ratio(self.right0, self.rows)}
        if self.drift:
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


def ratio(numerators: list[float], denominators: list[float]) -> list[float]:
    return [round(n / max(d, 1), 5) for n, d in zip(numerators, denominators, strict=True)]
