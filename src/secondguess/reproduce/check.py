"""Does a second measurement agree with the first? Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from secondguess.bench.paper import AVERAGE
from secondguess.errors import UserError
from secondguess.reproduce.estimate import Value
from secondguess.reproduce.outcome import Outcome

SHARE = 0.1
ROUNDING = 1e-9  # of sums in another order


def sample(found: Sequence[Outcome], seed: int) -> list[Outcome]:
    """A tenth of the cells that can be checked, half of them times, as far as there are any of either kind; one of each
    at least. Raises UserError when there are none.

    A time without an interval cannot: it is never the same twice. Nor are averages taken: other cells hold all that
    they are made of, and one of them would measure every task again.
    """
    able = [o for o in found if can_be_checked(o)]
    if not able:
        raise UserError("nothing to check: no cell with an interval has been measured with these settings")
    live, others = ([i for i, o in enumerate(able) if is_live(o) == timed] for timed in (True, False))
    count = max(round(SHARE * len(able)), bool(live) + bool(others))
    num_others = min(len(others), max(count // 2, count - len(live)))
    rng = random.Random(seed)
    chosen = rng.sample(others, num_others) + rng.sample(live, min(len(live), count - num_others))
    return [able[i] for i in sorted(chosen)]


def is_live(o: Outcome) -> bool:
    return o.cell.ours[0].kind == "live"


def can_be_checked(o: Outcome) -> bool:
    if o.value is None or not o.cell.ours or o.cell.place.column == AVERAGE:
        return False
    return o.value.low is not None or not is_live(o)


def agrees(first: Value, second: Value | None) -> bool:
    """The second number lies in the first one's interval, or is the same where there is none."""
    low, high = (first.low, first.high) if first.low is not None and first.high is not None else (first.value,) * 2
    return second is not None and low - ROUNDING <= second.value <= high + ROUNDING
