"""Bench rows, and the tables that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
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

EXCUSED_AT_MOST = 0.005  # of all texts; more is no accident
# Heading, field, format. Times are milliseconds per cycle.
COLUMNS = (
    ("method", "method", "{}"),
    ("budget", "budget", "{}"),
    ("tau", "acceptance_length", "{:.2f}"),
    ("no loops", "acceptance_length_nonlooping", "{:.2f}"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup_vs_ar", "{:.2f}x"),
    ("cycle", "cycle_ms", "{:.1f}"),
    ("draft", "draft_ms", "{:.1f}"),
    ("verify", "verify_ms", "{:.1f}"),
    ("identical", "identical_to_ar", "{:.1%}"),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a finished run found."""

    bench: Bench
    results: Mapping[Key, Result]
    audits: Mapping[Key, Audit]

    def complaints(self) -> list[str]:
        """A line for each result that differs from plain decoding without an excuse, and one if too many have one."""
        faults = [key for key, audit in self.audits.items() if not audit.excused]
        lines = [
            f"NOT LOSSLESS: {k.method} (budget {k.budget}, T = {k.temperature:g}) on {k.task} {k.id}" for k in faults
        ]
        num_excused = len(self.audits) - len(faults)
        if num_excused > EXCUSED_AT_MOST * len(self.results):
            lines.append(
                f"{num_excused} of {len(self.results)} texts differ by rounding, over {EXCUSED_AT_MOST:.1%} of them"
            )
        return lines

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
        prompts = f"{count} prompt{'s' if count > 1 else ''}, {looping:.0%} looping"
        made.append((f"{task}, T = {temperature:g}, {prompts}; ms per cycle", part))
    return made


def cells(row: Row) -> list[str]:
    texts = ["-" if row[field] is None else form.format(row[field]) for _, field, form in COLUMNS]
    if row["num_excused"]:
        texts[-1] += f", {row['num_excused']} excused"
    return texts


def rich_tables(rows: Sequence[Row]) -> list[Table]:
    """Tables for 80 columns. Where methods with settings do not fit, their names wrap and no number does."""
    tables = []
    for title, part in sections(rows):
        tables.append(table := Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False))
        for heading, *_ in COLUMNS:
            is_name = heading == "method"
            justify, overflow = ("left", "fold") if is_name else ("right", "crop")
            table.add_column(heading, justify=justify, overflow=overflow, no_wrap=not is_name)
        for row in part:
            table.add_row(*map(Text, cells(row)))
    return tables


def markdown(rows: Sequence[Row]) -> str:
    lines = []
    for title, part in sections(rows):
        head = [[heading for heading, *_ in COLUMNS], ["---", *["---:"] * (len(COLUMNS) - 1)]]
        lines += [f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in [*head, *map(cells, part)]), ""]
    return "\n".join(lines)
