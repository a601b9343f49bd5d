"""The report as data: what is shown where, whatever it is written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from secondguess.bench.paper import AVERAGE, HEADLINE, PAPER
from secondguess.reproduce.cells import Place
from secondguess.reproduce.estimate import Value
from secondguess.reproduce.outcome import Outcome, State, held_different
from secondguess.reproduce.tables import PR_GAIN

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
    "count": "{:,.0f}",
}
# What two numbers in one field of a table are.
FIELDS = {
    "table2": "speedup",
    "table7": "recovered / bucket's share of all rejected tokens",
    "table8": "prompts",
    "table9": "milliseconds a cycle, or their ratio",
    "figure1": "share of drafted tokens that are accepted; share of rejected tokens",
}
TAU_AND_SPEEDUP = "tau by replay / speedup live"


@dataclass(frozen=True, slots=True)
class Shown:
    """A number. ``note``: of the difference that it is part of, 0 if none."""

    text: str
    interval: str
    state: State
    note: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a grid: ``source`` is "here" or "paper"; a field holds a number per quantity, or none."""

    label: str
    source: str
    fields: list[list[Shown]]


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
    """``passport``: what made it. ``lead``: paragraphs. ``notes``: differences from the paper, numbered from 1."""

    title: str
    passport: str
    lead: list[str]
    chapters: list[Chapter]
    notes: list[str]


def chapters(outcomes: Sequence[Outcome], pictures: Mapping[str, list[str]]) -> list[Chapter]:
    """``pictures`` by table. Outcomes of a table are next to each other."""
    notes = {o.cell.place: number for number, o in enumerate((o for o in outcomes if o.differs), 1)}
    found = []
    for table, group in groupby(outcomes, lambda o: o.cell.place.table):
        parts: dict[str, list[Outcome]] = {}
        for o in group:
            parts.setdefault(o.cell.place.part, []).append(o)
        grids = [grid(title, part, notes) for title, part in parts.items()]
        name = f"{table[:-1].capitalize()} {table[-1]}"
        found.append(Chapter(name, PAPER[table].title, about(table), grids, pictures.get(table, [])))
    return found


def about(table: str) -> str:
    paper, what = PAPER[table], FIELDS.get(table, TAU_AND_SPEEDUP)
    where = f" The paper: {paper.model}" if paper.model else ""
    if paper.budget is not None:
        where += f", B = {paper.budget}"
    if paper.temperature is not None:
        where += f", T = {paper.temperature:g}"
    return f"{what[0].upper()}{what[1:]}.{where}{'.' if where else ''}"


def grid(title: str, part: Sequence[Outcome], notes: Mapping[Place, int]) -> Grid:
    columns, rows = (list(dict.fromkeys(getattr(o.cell.place, name) for o in part)) for name in ("column", "row"))
    at: dict[tuple[str, str], list[Outcome]] = {}
    for o in part:
        at.setdefault((o.cell.place.row, o.cell.place.column), []).append(o)
    lines = []
    for row in rows:
        fields = [at.get((row, column), []) for column in columns]
        lines.append(Line(row, "here", [[here(o, notes) for o in field] for field in fields]))
        if any(o.paper is not None for field in fields for o in field):
            lines.append(Line(row, "paper", [[theirs(o) for o in field if o.paper is not None] for field in fields]))
    return Grid(title, columns, lines, list(dict.fromkeys(o.why for o in part if o.why)))


def here(o: Outcome, notes: Mapping[Place, int]) -> Shown:
    if o.value is None:
        return Shown("-", "", o.state)
    return Shown(shown(o, o.value.value), interval(o, o.value), o.state, notes.get(o.cell.place, 0))


def theirs(o: Outcome) -> Shown:
    assert o.paper is not None
    return Shown(shown(o, o.paper), "", "paper")


def shown(o: Outcome, number: float) -> str:
    return FORMATS[o.cell.place.quantity].format(number)


def interval(o: Outcome, value: Value) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"{shown(o, value.low)} to {shown(o, value.high)}"


def differences(outcomes: Sequence[Outcome], held: Mapping[str, str]) -> list[str]:
    """What contradicts the paper, and what was held different there. ``held``: see ``held_different``."""
    notes = []
    for o in outcomes:
        if o.differs:
            assert o.value is not None
            assert o.paper is not None
            p = o.cell.place
            where = f"{p.table[:-1].capitalize()} {p.table[-1]}, {p.part}: {p.row}, {p.column}, {p.quantity}"
            ours = f"here {shown(o, o.value.value)} [{interval(o, o.value)}], paper {shown(o, o.paper)}"
            notes.append(f"{where}: {ours}: {o.differs}. Held different: {'; '.join(held_different(o, held))}.")
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


def tally(outcomes: Sequence[Outcome]) -> str:
    measured = sum(o.value is not None for o in outcomes)
    papers, differing = sum(o.paper is not None for o in outcomes), sum(bool(o.differs) for o in outcomes)
    return (
        f"{len(outcomes)} cells: {measured} measured, {len(outcomes) - measured} not. The paper's number is known for "
        f"{papers}; {differing} contradict{'s' * (differing == 1)} it."
    )
