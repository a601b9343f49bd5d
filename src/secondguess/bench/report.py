"""Bench rows, and the tables that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from secondguess.bench.audit import Audit
from secondguess.bench.metrics import measure
from secondguess.bench.plan import shape
from secondguess.bench.result import Key, Result
from secondguess.bench.runner import Bench, keys
from secondguess.methods import Method

Row = dict[str, Any]
ALL = "all tasks"

# Heading, field, format.
COLUMNS = (
    ("method", "method", "{}"),
    ("budget", "budget", "{}"),
    ("tau", "acceptance_length", "{:.2f}"),
    ("no loops", "acceptance_length_nonlooping", "{:.2f}"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup_vs_ar", "{:.2f}x"),
    ("cycle ms", "cycle_ms", "{:.1f}"),
    ("draft", "draft_ms", "{:.1f}"),
    ("verify", "verify_ms", "{:.1f}"),
    ("identical", "identical_to_ar", "{:.1%}"),
    ("excused", "num_excused", "{}"),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a finished run found."""

    bench: Bench
    results: Mapping[Key, Result]
    audits: Mapping[Key, Audit]

    @property
    def faults(self) -> list[Key]:
        """Results that differ from plain decoding without an excuse."""
        return [key for key, audit in self.audits.items() if not audit.excused]

    def rows(self) -> list[Row]:
        """One row per temperature, task and method, in this order."""
        tasks = dict.fromkeys(group.task for group in self.bench.groups)
        return [self.row(m, task, t) for t in self.bench.temperatures for task in tasks for m in self.bench.llms]

    def totals(self) -> list[Row]:
        """One row per temperature and method, over all tasks."""
        return [self.row(m, ALL, t) for t in self.bench.temperatures for m in self.bench.llms]

    def row(self, method: Method, task: str, temperature: float) -> Row:
        plain = next(iter(self.bench.llms))
        groups = [group for group in self.bench.groups if task in (ALL, group.task)]
        ours, theirs = ([key for g in groups for key in keys(g, m, temperature)] for m in (method, plain))
        return {
            "method": method.typed,
            "task": task,
            "temperature": temperature,
            **shape(method),
            "batch_size": self.bench.batch_size,
            **measure([self.results[key] for key in ours], [self.results[key] for key in theirs]),
            "num_excused": sum(self.audits[key].excused for key in ours if key in self.audits),
        }


def sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Title and rows of each table."""
    made = []
    for (task, temperature), group in groupby(rows, lambda row: (row["task"], row["temperature"])):
        part = list(group)
        count, looping = part[0]["num_prompts"], part[0]["looping"]
        made.append((f"{task}, T = {temperature:g}, {count} prompts, {looping:.0%} of them looping", part))
    return made


def cells(row: Row) -> list[str]:
    return ["-" if row[field] is None else form.format(row[field]) for _, field, form in COLUMNS]


def rich_tables(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for title, part in sections(rows):
        tables.append(table := Table(title=title, title_justify="left"))
        for heading, *_ in COLUMNS:
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for row in part:
            table.add_row(*map(Text, cells(row)))
    return tables


def markdown(rows: Sequence[Row]) -> str:
    lines = []
    for title, part in sections(rows):
        head = [[heading for heading, *_ in COLUMNS], ["---", *["---:"] * (len(COLUMNS) - 1)]]
        lines += [f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in [*head, *map(cells, part)]), ""]
    return "\n".join(lines)
