"""The report as data: what is shown where, whatever it is written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from secondguess.bench.paper import AVERAGE, PAPER
from secondguess.reproduce.cells import Kind, Place
from secondguess.reproduce.estimate import Value
from secondguess.reproduce.outcome import Outcome, State

FORMATS = {
    "tau": "{:.2f}",
    "speedup": "{:.2f}x",
    "tau gain": "{:+.1%}",
    "speedup gain": "{:+.1%}",
    "cycle ms": "{:.1f} ms",
    "cycle ratio": "{:.3f}",
    "bound": "{:.3f}",
    "recovered": "{:.1%}",
    "pool": "{:.1%}",
    "share": "{:.1%}",
    "change recovered": "{:+.3f}",
    "change unrecovered": "{:+.3f}",
    "count": "{:,.0f}",
}
# What two numbers in one field of a table are.
FIELDS = {
    "table2": "speedup",
    "table7": "recovered / bucket's share of all rejected tokens; then changes where recovered / where not",
    "table8": "prompts",
    "table9": "milliseconds a cycle, or their ratio",
    "figure1": "share of drafted tokens that are accepted; share of rejected tokens",
}
TAU_AND_SPEEDUP = "tau by replay / speedup live"
UNITS: dict[Kind, str] = {"replay": "prompts", "live": "prompts or batches", "diagnosis": "tokens"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a field. ``more``: what it was measured on, or why it was not.

    ``note``: number of its difference, 0 if none.
    """

    text: str
    interval: str
    state: State
    more: str = ""
    note: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a grid: ``source`` is "here" or "paper"; a field holds a number per quantity, or none."""

    label: str
    source: str
    fields: list[list[Number]]


@dataclass(frozen=True, slots=True)
class Grid:
    """``reasons``: why some of its cells have no number."""

    title: str
    columns: list[str]
    lines: list[Line]
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class Chapter:
    """A table or figure. ``pictures``: files of the report's folder."""

    name: str
    title: str
    about: str
    grids: list[Grid]
    pictures: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """``passport``: what made it. ``lead``: paragraphs. ``notes``: differences from the paper, numbered from 1.

    ``held``: what was another than in the paper in all of them.
    """

    title: str
    passport: str
    lead: list[str]
    chapters: list[Chapter]
    notes: list[str]
    held: str


def chapters(outcomes: Sequence[Outcome], pictures: Mapping[str, list[str]]) -> list[Chapter]:
    """``pictures`` by table. Outcomes of a table are next to each other."""
    notes = note_numbers(outcomes)
    found = []
    for table, group in groupby(outcomes, lambda o: o.cell.place.table):
        parts: dict[str, list[Outcome]] = {}
        for o in group:
            parts.setdefault(o.cell.place.part, []).append(o)
        grids = [grid(title, part, notes) for title, part in parts.items()]
        name = f"{table[:-1].capitalize()} {table[-1]}"
        found.append(Chapter(name, PAPER[table].title, about(table), grids, pictures.get(table, [])))
    return found


def note_numbers(outcomes: Sequence[Outcome]) -> dict[Place, int]:
    return {o.cell.place: number for number, o in enumerate((o for o in outcomes if o.differs), 1)}


def summary(outcomes: Sequence[Outcome]) -> Chapter | None:
    """Table 1's averages, a column per budget and temperature, if any of them was measured."""
    averages = [o for o in outcomes if (o.cell.place.table, o.cell.place.column) == ("table1", AVERAGE)]
    if not any(o.value for o in averages):
        return None
    averaged = grid("averages over tasks", averages, note_numbers(outcomes), across="part")
    return Chapter("Summary", "PR beside EAGLE-3.1", about("table1"), [averaged], [])


def about(table: str) -> str:
    paper, what = PAPER[table], FIELDS.get(table, TAU_AND_SPEEDUP)
    where = f" The paper: {paper.model}" if paper.model else ""
    if paper.budget is not None:
        where += f", B = {paper.budget}"
    if paper.temperature is not None:
        where += f", T = {paper.temperature:g}"
    return f"{what[0].upper()}{what[1:]}.{where}{'.' if where else ''}"


def grid(title: str, part: Sequence[Outcome], notes: Mapping[Place, int], across: str = "column") -> Grid:
    """``across``: what of a place makes a column."""
    at: dict[tuple[str, str], list[Outcome]] = {}
    for o in part:
        at.setdefault((o.cell.place.row, getattr(o.cell.place, across)), []).append(o)
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*at, strict=True))
    lines = []
    for row in rows:
        fields = [at.get((row, column), []) for column in columns]
        lines.append(Line(row, "here", [[our_number(o, notes) for o in field] for field in fields]))
        if any(o.paper is not None for field in fields for o in field):
            lines.append(
                Line(row, "paper", [[paper_number(o) for o in field if o.paper is not None] for field in fields])
            )
    return Grid(title, columns, lines, list(dict.fromkeys(o.why for o in part if o.why)))


def our_number(o: Outcome, notes: Mapping[Place, int]) -> Number:
    if o.value is None:
        return Number("-", "", o.state, f"not measured: {o.why}")
    note = notes.get(o.cell.place, 0)
    return Number(formatted(o, o.value.value), formatted_interval(o, o.value), o.state, measured_on(o, o.value), note)


def measured_on(o: Outcome, value: Value) -> str:
    if not o.cell.ours:
        return o.state
    tasks = f" of {value.num_tasks} tasks" if value.num_tasks > 1 else ""
    loops = "" if value.with_loops is None else f"; {formatted(o, value.with_loops)} with those that repeat themselves"
    why = f"; {o.explanation}" if o.explanation else ""
    return f"measured on {value.num_units:,} {UNITS[o.cell.ours[0].kind]}{tasks}{loops}{why}"


def paper_number(o: Outcome) -> Number:
    assert o.paper is not None
    return Number(formatted(o, o.paper), "", "paper", "from the paper")


def formatted(o: Outcome, number: float) -> str:
    return FORMATS[o.cell.place.quantity].format(number)


def formatted_interval(o: Outcome, value: Value) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"{formatted(o, value.low)} to {formatted(o, value.high)}"
