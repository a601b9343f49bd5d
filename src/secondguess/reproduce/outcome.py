"""What became of each cell, and whether it contradicts the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from secondguess.bench.paper import AVERAGE, PAPER
from secondguess.reproduce.cells import At, Cell, Measurement, Place
from secondguess.reproduce.estimate import Value, diagnosed, estimate
from secondguess.reproduce.parts import heading
from secondguess.reproduce.records import Record

State = Literal["measured", "computed", "found", "not measured", "paper"]
# What can contradict the paper, with the value at which a method makes no difference. Others depend on the target.
NO_DIFFERENCE = {"tau gain": 0.0, "speedup gain": 0.0, "cycle ratio": 1.0, "recovered": 0.0, "pool": 0.0, "share": 0.0}
KNOWN: dict[str, State] = {"bound": "computed", "count": "found"}  # what numbers are that need no measuring
YET = "not measured yet"
LOOPS = "every text repeats itself, or nothing was decoded"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell with its number, or why it has none. ``differs``: how it contradicts ``paper``, empty if it does not."""

    cell: Cell
    value: Value | None
    why: str
    paper: float | None
    differs: str = ""
    explanation: str = ""  # of the difference, as somebody gave it

    @property
    def state(self) -> State:
        if self.value is None:
            return "not measured"
        return "measured" if self.cell.known is None else KNOWN[self.cell.place.quantity]

    def rows(self) -> list[dict[str, Any]]:
        """For JSON and CSV: ours, and the paper's number if it has one."""
        where, nothing = self.cell.place._asdict(), dict.fromkeys(field.name for field in fields(Value))
        ours = asdict(self.value) if self.value else nothing
        words = {"why": self.why, "differs": self.differs, "explanation": self.explanation}
        made = [where | {"state": self.state} | ours | words]
        if self.paper is not None:
            made.append(where | {"state": "paper"} | nothing | {"value": self.paper} | dict.fromkeys(words, ""))
        return made


def outcomes(cells: Sequence[Cell], records: Mapping[Measurement, Record]) -> list[Outcome]:
    """In the order of the cells. A cell for which something has not been measured yet has no number."""
    papers = published(cells)
    return [outcome(cell, records, papers.get(cell.place)) for cell in cells]


def outcome(cell: Cell, records: Mapping[Measurement, Record], paper: float | None) -> Outcome:
    value, why = number_of(cell, records)
    return Outcome(cell, value, why, paper, contradiction(cell.place.quantity, value, paper))


def number_of(cell: Cell, records: Mapping[Measurement, Record]) -> tuple[Value | None, str]:
    """The number, or why there is none."""
    if cell.known is not None:
        return Value(cell.known, None, None, 0, 0), ""
    if cell.why:
        return None, cell.why
    if not all(m in records for m in cell.measurements):
        return None, YET
    ours, over = ([records[m] for m in part] for part in (cell.ours, cell.over))
    failed = next((record for record in (*ours, *over) if record.failed), None)
    if failed is not None:
        return None, "; ".join(failed.complaints)
    if cell.ours[0].kind == "diagnosis":
        value = diagnosed(cell.place, ours[0].found)
        return value, "" if value else "no token is in this bucket"
    value = estimate(cell.place.quantity, ours, over)
    return value, "" if value else LOOPS


def published(cells: Sequence[Cell]) -> dict[Place, float]:
    """The paper's numbers, each at the cell with its budget and temperature, else at the first of its name."""
    candidates: dict[tuple[str, tuple[str, str, str]], list[Place]] = {}
    for cell in cells:
        table, _, *name = cell.place
        row, column, quantity = name
        candidates.setdefault((table, (row, column, quantity)), []).append(cell.place)
    found = {}
    for (table, name), places in candidates.items():
        paper = PAPER[table]
        if name in paper.numbers:
            own = own_heading(table)
            found[next((p for p in places if p.part == own), places[0])] = paper.numbers[name]
    return found


def own_heading(table: str) -> str:
    """The part of a table that the paper's numbers belong to."""
    paper = PAPER[table]
    if paper.temperature is None:
        return ""
    return f"T = {paper.temperature:g}" if paper.budget is None else heading(At(paper.budget, paper.temperature))


def contradiction(quantity: str, value: Value | None, paper: float | None) -> str:
    """How the interval of ``value`` contradicts the paper: it lies on the other side of no difference, or wholly
    outside of half to twice the paper's difference.
    """
    if value is None or value.low is None or value.high is None or paper is None or quantity not in NO_DIFFERENCE:
        return ""
    low, high, theirs = (x - NO_DIFFERENCE[quantity] for x in (value.low, value.high, paper))
    if high < 0 < theirs or theirs < 0 < low:
        return "the sign differs"
    least, most = sorted((theirs / 2, theirs * 2))
    return "outside of half to twice the paper's" if high < least or low > most else ""


def held_different(outcome: Outcome) -> list[str]:
    """What was another than in the paper, beside what is another in every cell: target, drafters, texts, machine."""
    place, at, paper = outcome.cell.place, outcome.cell.ours[0].at, PAPER[outcome.cell.place.table]
    found = []
    if paper.budget is not None and paper.budget != at.budget:
        found.append(f"B = {at.budget} (paper: {paper.budget})")
    if paper.temperature is not None and paper.temperature != at.temperature:
        found.append(f"T = {at.temperature:g} (paper: {paper.temperature:g})")
    num_tasks = len({column for _, column, _ in paper.numbers} - {AVERAGE})
    if place.column == AVERAGE and outcome.value is not None and outcome.value.num_tasks < num_tasks:
        found.append(f"average over {outcome.value.num_tasks} of {num_tasks} tasks")
    return found
