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
from secondguess.bench.peers.known import KNOWN, PEER
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
    ("nodes", "mean_nodes", "{:.1f}"),
    ("steps", "mean_steps", "{:.1f}"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup_vs_ar", "{:.2f}x"),
    ("best plain", "speedup_vs_fastest_plain", "{:.2f}x"),
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
        """A line for each result that failed, or differs without an excuse, and one if too many have an excuse."""
        faults = [key for key, audit in self.audits.items() if not audit.excused]
        lines = [
            f"NOT LOSSLESS: {k.method} (budget {k.budget}, T = {k.temperature:g}) on {k.task} {k.id}" for k in faults
        ]
        lines += [
            f"FAILED: {k.method} (budget {k.budget}, T = {k.temperature:g}) on {k.task} {k.id}: {r.error}"
            for k, r in self.results.items()
            if r.error is not None
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
        return [row for t in self.bench.temperatures for task in tasks for row in self.block(task, t)]

    def totals(self) -> list[Row]:
        """One row per temperature and method, over all tasks."""
        return [row for t in self.bench.temperatures for row in self.block(ALL, t)]

    def block(self, task: str, temperature: float) -> list[Row]:
        """A row per method, each with its speedup over the fastest plain decoder that computes in the same numbers."""
        methods = self.bench.methods(temperature)
        rows = [self.row(method, task, temperature) for method in methods]
        speed: dict[str, float] = {}
        for method, row in zip(methods, rows, strict=True):
            if is_plain(method) and (tokens_per_second := row.get("tokens_per_second")):
                speed[row["mode"]] = max(speed.get(row["mode"], 0.0), tokens_per_second)
        for row in rows:
            ours, theirs = row.get("tokens_per_second"), speed.get(row["mode"])
            row["speedup_vs_fastest_plain"] = ours / theirs if ours and theirs else None
        return rows

    def row(self, method: Method, task: str, temperature: float) -> Row:
        plain = next(iter(self.bench.llms))
        turns = [(n, g) for n in range(self.bench.num_rounds) for g in self.bench.groups if task in (ALL, g.task)]
        ours, theirs = ([key for n, g in turns for key in keys(g, m, temperature, n)] for m in (method, plain))
        return {
            "method": method.typed,
            "task": task,
            "temperature": temperature,
            **shape(method),
            "batch_size": self.bench.batch_size,
            "num_rounds": self.bench.num_rounds,
            "mode": self.mode(method),
            **measure([self.results[key] for key in ours], [self.results[key] for key in theirs]),
            "num_excused": sum(self.audits[key].excused for key in ours if key in self.audits),
        }

    def mode(self, method: Method) -> str:
        """The numbers that a method computes with."""
        if method in self.bench.peers:
            return self.bench.peers[method].mode
        return self.bench.llms[method].target.spec.mode


def is_plain(method: Method) -> bool:
    return KNOWN[method.typed].plain if method.name == PEER else method.name == "ar"


def sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Title and rows of each table."""
    made = []
    for (task, temperature), group in groupby(rows, lambda row: (row["task"], row["temperature"])):
        part = list(group)
        count, looping = part[0]["num_prompts"], part[0].get("looping", 0.0)
        prompts = f"{count} prompt{'s' if count > 1 else ''}, {looping:.0%} looping"
        made.append((f"{task}, T = {temperature:g}, {prompts}; ms per cycle", part))
    return made


def columns(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Without peers, the fastest plain decoder is ours, and the speedup is said already. Nodes and steps are told
    where they were chosen."""
    hidden = set() if any(row["method"] in KNOWN for row in rows) else {"speedup_vs_fastest_plain"}
    if not any(row["budget"] == "auto" for row in rows):
        hidden |= {"mean_nodes", "mean_steps"}
    return [column for column in COLUMNS if column[1] not in hidden]


def cells(row: Row, shown: Sequence[tuple[str, str, str]]) -> list[str]:
    texts = ["-" if row.get(field) is None else form.format(row[field]) for _, field, form in shown]
    if row["num_failed"]:
        texts[-1] += f", {row['num_failed']} failed"
    if row["num_excused"]:
        texts[-1] += f", {row['num_excused']} excused"
    return texts


def rich_tables(rows: Sequence[Row]) -> list[Table]:
    """Tables for 80 columns. Where methods with settings do not fit, their names wrap and no number does."""
    tables = []
    for title, part in sections(rows):
        tables.append(
            table := Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
        )
        for heading, *_ in (shown := columns(rows)):
            is_name = heading == "method"
            justify, overflow = ("left", "fold") if is_name else ("right", "crop")
            table.add_column(heading, justify=justify, overflow=overflow, no_wrap=not is_name)
        for row in part:
            table.add_row(*map(Text, cells(row, shown)))
    return tables


def markdown(rows: Sequence[Row]) -> str:
    lines = []
    for title, part in sections(rows):
        shown = columns(rows)
        head = [[heading for heading, *_ in shown], ["---", *["---:"] * (len(shown) - 1)]]
        body = [cells(row, shown) for row in part]
        lines += [f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in [*head, *body]), ""]
    return "\n".join(lines)
