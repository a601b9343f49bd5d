"""Whether an answer to a word problem is right: its last number is the reference's."""

from __future__ import annotations

import re
from math import sqrt

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Z = 1.96  # 95 %


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def is_right(answer: str, reference: str) -> bool:
    """``reference`` may be a worked solution, whose last number is the result."""
    wanted = last_number(reference)
    return wanted is not None and last_number(answer) == wanted


def interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, for one answer at least."""
    share, squared = right / total, Z * Z / total
    centre, spread = share + squared / 2, Z * sqrt(share * (1 - share) / total + squared / (4 * total))
    return max(0.0, (centre - spread) / (1 + squared)), min(1.0, (centre + spread) / (1 + squared))
