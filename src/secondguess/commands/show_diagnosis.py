"""The tables of ``diagnose``, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from secondguess.bench.diagnosis import ALL, BUCKETS, Cell, Diagnosis, Share

NAMES = (*BUCKETS, ALL)


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    header: tuple[str, ...]
    rows: list[list[str]]


def sections(d: Diagnosis) -> list[Section]:
    interval = "[95 % Wilson interval]"
    recovered = f"Table 7: % recovered by level 1 {interval} (bucket's % of {d.rejected:,} rejected tokens)"
    change = "Table 7: change of top-1 probability from level 0 to level 1, recovered / not recovered"
    spoiled = f"Right guesses of level 0 that level 1 breaks, % {interval}"
    facts = [
        ["refined offers that repeat a level-0 child", *percent_of(d.duplicates)],
        ["repeated ones that level 1 finds more probable", *percent_of(d.raised)],
        ["rejected tokens outside the draft vocabulary", *percent_of(d.unknown)],
    ]
    return [
        grid(recovered, d.table7, lambda c: f"{percent(c.recovered)} ({points(c.pool.share)})"),
        grid(change, d.table7, lambda c: f"{signed(c.change_recovered)} / {signed(c.change_unrecovered)}"),
        Section(spoiled, ("drafter", "%", "of"), [[name, *percent_of(share)] for name, share in d.broken.items()]),
        Section("Shares", ("", f"% {interval}", "of"), facts),
    ]


def grid(title: str, cells: list[Cell], show: Callable[[Cell], str]) -> Section:
    """Drafter confidence down, target confidence across."""
    shown = {(c.drafter, c.target): show(c) for c in cells}
    rows = [[drafter, *(shown[drafter, target] for target in NAMES)] for drafter in NAMES]
    return Section(title, ("drafter", *(f"target {name}" for name in BUCKETS), ALL), rows)


def rich_tables(d: Diagnosis) -> list[Group]:
    """A title, which may be wider than its table, and the table."""
    tables = []
    for section in sections(d):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        tables.append(Group(Text(section.title, style="bold"), table))
        for i, heading in enumerate(section.header):
            table.add_column(heading, justify="right" if i else "left")
        for row in section.rows:
            table.add_row(*map(Text, row))
    return tables


def markdown(d: Diagnosis) -> str:
    lines = []
    for s in sections(d):
        rule = ["---", *["---:"] * (len(s.header) - 1)]
        lines += [f"**{s.title}**", "", *(f"| {' | '.join(row)} |" for row in [s.header, rule, *s.rows]), ""]
    return "\n".join(lines)


def percent_of(share: Share) -> tuple[str, str]:
    return percent(share), f"{share.count:,}"


def percent(share: Share) -> str:
    if share.share is None:
        return "-"
    return f"{points(share.share)} [{points(share.low)}, {points(share.high)}]"


def points(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".removesuffix("%")


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"
