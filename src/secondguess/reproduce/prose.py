"""What a report says in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from secondguess.bench.paper import AVERAGE, HEADLINE
from secondguess.reproduce.layout import formatted, formatted_interval
from secondguess.reproduce.outcome import Outcome, held_different
from secondguess.reproduce.tables import PR_GAIN

RECOVERED = ("drafter all", "target all", "recovered")


def differences(outcomes: Sequence[Outcome]) -> list[str]:
    """What contradicts the paper, and what more than everywhere was held different there."""
    notes = []
    for o in outcomes:
        if o.differs:
            assert o.value is not None
            assert o.paper is not None
            p = o.cell.place
            where = f"{p.table[:-1].capitalize()} {p.table[-1]}, {p.part}: {p.row}, {p.column}, {p.quantity}"
            ours = f"{formatted(o, o.value.value)} [{formatted_interval(o, o.value)}]"
            said = f"{where}: here {ours}, paper {formatted(o, o.paper)}: {o.differs}."
            also = "; ".join(held_different(o))
            held = f" Also held different: {also}." if also else ""
            notes.append(f"{said}{held} {o.explanation or 'No explanation is given.'}")
    return notes


def headline(outcomes: Sequence[Outcome]) -> str:
    """PR's average gains beside the paper's, or nothing if none was measured."""
    said = []
    for quantity, (least, most) in HEADLINE.items():
        places = [o for o in outcomes if o.cell.place[2:] == (PR_GAIN, AVERAGE, quantity)]
        found = [o.value.value for o in places if o.value]
        if found:
            low, high = min(found), max(found)
            ours = f"{low:+.1%}" if len(found) == 1 else f"{low:+.1%} to {high:+.1%}"
            said.append(f"{quantity.removesuffix(' gain')} {ours} (paper: {least:+.1%} to {most:+.1%})")
    return f"PR over EAGLE-3.1, averages over tasks: {'; '.join(said)}." if said else ""


def recovery(outcomes: Sequence[Outcome]) -> str:
    """How many of the rejected tokens second looks get right, which bounds what they can gain; nothing if unknown."""
    for o in outcomes:
        if o.cell.place[2:] == RECOVERED and o.value and o.paper is not None:
            ours = f"{formatted(o, o.value.value)} [{formatted_interval(o, o.value)}]"
            return f"A second look gets {ours} of the rejected tokens right (paper: {formatted(o, o.paper)})."
    return ""


def tally(outcomes: Sequence[Outcome]) -> str:
    states = Counter(o.state for o in outcomes)
    ours = ", ".join(f"{states[s]} {s}" for s in ("measured", "computed", "found", "not measured") if states[s])
    papers, differing = sum(o.paper is not None for o in outcomes), sum(bool(o.differs) for o in outcomes)
    return (
        f"{len(outcomes)} cells: {ours}. The paper's number is known for "
        f"{papers}; {differing} contradict{'s' * (differing == 1)} it."
    )
