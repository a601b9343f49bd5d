"""A cell of a table, and what has to be measured for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["replay", "live", "diagnosis"]
# What each quantity is taken from. A gain and a ratio come from what their two methods have.
KINDS: dict[str, Kind] = {
    "tau": "replay",
    "speedup": "live",
    "cycle ms": "live",
    "recovered": "diagnosis",
    "pool": "diagnosis",
    "share": "diagnosis",
    "change recovered": "diagnosis",
    "change unrecovered": "diagnosis",
}
MIN_UNITS = 5  # a task, on average, that an interval needs: fewer say nothing of how others would differ
BASE_OF = {"tau gain": "tau", "speedup gain": "speedup", "cycle ratio": "cycle ms"}


class Place(NamedTuple):
    """Where a number stands."""

    table: str
    part: str  # budget and temperature, as the heading says them
    row: str
    column: str
    quantity: str


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter and a method that drafts with it."""

    drafter: str  # its name: what ships under it, or what --arm gives
    method: str  # as --method takes it
    serial: bool = False  # second looks take forwards of their own

    @property
    def name(self) -> str:
        return f"{self.drafter}/{self.method}{' serial' if self.serial else ''}"


@dataclass(frozen=True, slots=True)
class At:
    """With what budget, temperature and batch."""

    budget: int
    temperature: float
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured at one go, once, however many cells ask for it."""

    kind: Kind
    variant: Variant
    tasks: tuple[str, ...]  # one, but for a diagnosis
    at: At


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of a table: what is measured for it, one measurement a task, or why nothing is.

    ``over``: of the method that a gain or a ratio is counted over. ``known``: a number that needs no measuring.
    """

    place: Place
    ours: tuple[Measurement, ...] = ()
    over: tuple[Measurement, ...] = ()
    known: float | None = None
    why: str = ""

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return self.ours + self.over


def teams(cells: Iterable[Cell]) -> list[list[Measurement]]:
    """What the cells ask for, each once. Times that are divided by each other, directly or through others, are a team:
    they must be of one session. Everything else is alone.
    """
    team_of: dict[Measurement, list[Measurement]] = {}
    for cell in cells:
        for m in cell.measurements:
            team_of.setdefault(m, [m])
        for ours, over in zip(cell.ours, cell.over, strict=False):  # most cells have none to be counted over
            mine, others = team_of[ours], team_of[over]
            if ours.kind == "live" and mine is not others:
                mine += others
                team_of |= dict.fromkeys(others, mine)
    return list({id(team): team for team in team_of.values()}.values())
