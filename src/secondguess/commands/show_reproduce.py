"""What ``secondguess reproduce`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from secondguess.commands.compare import stdout_console
from secondguess.reproduce.layout import Report
from secondguess.reproduce.outcome import YET, Outcome
from secondguess.reproduce.plan import words


def make_table(*headings: str) -> Table:
    """Words to the left, and after the first column numbers to the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold")
    return table


def print_plan(found: Sequence[Outcome], jobs: Sequence[Mapping[str, Any]], source: str, report_bytes: int) -> None:
    console = stdout_console()
    cells = make_table("cells of", "all", "known", "to measure", "cannot be")
    for table, group in groupby(found, lambda o: o.cell.place.table):
        part = list(group)
        known, todo = sum(o.value is not None for o in part), sum(o.why == YET for o in part)
        cells.add_row(table, *map(str, (len(part), known, todo, len(part) - known - todo)))
    console.print(cells, "")
    for reason in dict.fromkeys(o.why for o in found if o.value is None and o.why != YET):
        console.print(f"cannot be measured: {reason}", markup=False, soft_wrap=True)
    if not jobs:
        console.print("nothing is left to measure")
        return
    shown = make_table("jobs", "T", "batch", "methods", "prompts", "about")
    for job in jobs:
        about = "?" if job["seconds"] is None else words(job["seconds"])
        batch = job["batch_size"] if job["kind"] == "live" else "-"
        numbers = (f"{job['temperature']:g}", batch, len(job["methods"]), job["num_prompts"], about)
        shown.add_row(Text(f"{job['kind']}: {', '.join(job['tasks'])}"), *map(str, numbers))
    console.print("", shown, "")
    console.print(total(jobs, source, report_bytes), markup=False, soft_wrap=True)


def total(jobs: Sequence[Mapping[str, Any]], source: str, report_bytes: int) -> str:
    disk = (sum(job["bytes"] for job in jobs) + report_bytes) / 1e6
    if not source:
        return f"{len(jobs)} jobs, and about {disk:.0f} MB; their time is not known: the probe's answer ended at once"
    seconds = sum(job["seconds"] for job in jobs)
    return f"{len(jobs)} jobs: at most about {words(seconds)} (from {source}), and about {disk:.0f} MB"


def print_report(report: Report, folder: Path) -> None:
    console = stdout_console()
    for paragraph in report.lead:
        console.print(Text(paragraph), "")
    for number, note in enumerate(report.notes, 1):
        console.print(Text(f"({number}) {note}"))
    where = f"report: {folder / 'report.html'} (also report.md, cells.csv, cells.json)"
    console.print(where, markup=False, soft_wrap=True)


def print_check(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    console, table = stdout_console(), make_table("cell", "first", "interval", "again", "agrees")
    for row in rows:
        where = f"{row['table']}, {row['part']}: {row['row']}, {row['column']}, {row['quantity']}"
        first, low, high, again = (number(row[name]) for name in ("first", "low", "high", "second"))
        table.add_row(Text(where), first, f"{low} to {high}", again, "yes" if row["agrees"] else "NO")
    console.print(table, "")
    agree = sum(row["agrees"] for row in rows)
    console.print(f"{agree} of {len(rows)} cells agree: {folder / 'check.json'}", markup=False, soft_wrap=True)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
