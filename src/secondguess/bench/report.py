"""Bench rows, and the tables that show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from secondguess.bench.audit import Audit
from secondguess.bench.metrics import measure, speedup_over
from secondguess.bench.peers.known import KNOWN, PEER
from secondguess.bench.plan import shape
from secondguess.bench.result import Key, Result
from secondguess.bench.runner import Bench, keys
from secondguess.bench.tasks import ALL
from secondguess.methods import Method

Row = dict[str, Any]

EXCUSED_AT_MOST = 0.005  # of the texts of a method, budget and temperature; more is no accident
UNACCOUNTED_AT_MOST = 0.02  # of a method's wall time
# Heading, field, format. Times are milliseconds per cycle.
COLUMNS = (
    ("method", "method", "{}"),
    ("numbers", "mode", "{}"),
    ("budget", "budget", "{}"),
    ("tau", "acceptance_length", "{:.2f}"),
    ("no loops", "acceptance_length_nonlooping", "{:.2f}"),
    ("nodes", "mean_nodes", "{:.1f}"),
    ("steps", "mean_steps", "{:.1f}"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup_nonlooping", "{:.2f}x"),
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
        texts = Counter((k.method, k.budget, k.temperature) for k in self.results)
        excused = Counter((k.method, k.budget, k.temperature) for k, audit in self.audits.items() if audit.excused)
        lines += [
            f"{count} of {texts[run]} texts of {run[0]} (budget {run[1]}, T = {run[2]:g}) differ by rounding, over "
            f"{EXCUSED_AT_MOST:.1%} of them"
            for run, count in excused.items()
            if count > EXCUSED_AT_MOST * texts[run]
        ]
        return lines

    def doubts(self) -> list[str]:
        """A line for each of our methods whose times do not add up to the wall time of its calls."""
        return [
            f"{row['method']} (budget {row['budget']}, T = {row['temperature']:g}): {row['unaccounted']:.1%} of the "
            f"wall time is in neither prefill nor cycles, over {UNACCOUNTED_AT_MOST:.0%}: the machine was not quiet"
            for row in self.totals()
            if row["method"] not in KNOWN and (row.get("unaccounted") or 0) > UNACCOUNTED_AT_MOST
        ]

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
        rows = {method: self.row(method, task, temperature) for method in methods}
        fastest: dict[str, Method] = {}
        for method in sorted(filter(is_plain, methods), key=lambda m: rows[m].get("tokens_per_second") or 0):
            if not rows[method]["num_failed"]:  # else it was timed on fewer prompts
                fastest[rows[method]["mode"]] = method
        for method, row in rows.items():
            plain = fastest.get(row["mode"])
            if plain is None or (self.bench.peers and temperature):  # peers are greedy: nobody knows who is fastest
                row["speedup_vs_fastest_plain"] = None
                continue
            ours, theirs = (self.over(task, temperature, m) for m in (method, plain))
            row |= speedup_over(ours, theirs, "speedup_vs_fastest_plain") | {"fastest_plain": plain.typed}
        return list(rows.values())

    def over(self, task: str, temperature: float, method: Method) -> list[Result]:
        """A method's results, round by round."""
        turns = [(n, g) for n in range(self.bench.num_rounds) for g in self.bench.groups if task in (ALL, g.task)]
        return [self.results[key] for n, g in turns for key in keys(g, method, temperature, n)]

    def row(self, method: Method, task: str, temperature: float) -> Row:
        plain = next(iter(self.bench.llms))
        ours, theirs = (self.over(task, temperature, m) for m in (method, plain))
        return {
            "method": method.typed,
            "task": task,
            "temperature": temperature,
            **shape(method),
            "batch_size": self.bench.batch_size,
            "num_rounds": self.bench.num_rounds,
            "mode": self.mode(method),
            **measure(ours, theirs),
            "num_excused": sum(self.audits[r.key].excused for r in ours if r.key in self.audits),
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
        prompts += " (in no speedup)" if looping else ""
        made.append((f"{task}, T = {temperature:g}, {prompts}; ms per cycle", part))
    return made


def columns(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Without peers, the fastest plain decoder is ours, and the speedup is said already; with peers, there is no room
    for tau without loops and the parts of a cycle. Nodes and steps are told where they were chosen."""
    has_peers = any(row["method"] in KNOWN for row in rows)
    hidden = {"acceptance_length_nonlooping", "draft_ms"} if has_peers else {"speedup_vs_fastest_plain", "mode"}
    if not any(row["budget"] == "auto" for row in rows):
        hidden |= {"mean_nodes", "mean_steps"}
    return [column for column in COLUMNS if column[1] not in hidden]


def cells(row: Row, shown: Sequence[tuple[str, str, str]]) -> list[str]:
    texts = ["-" if row.get(field) is None else form.format(row[field]) for _, field, form in shown]
    if row["method"] in KNOWN:  # what another engine drafts is its own business
        texts[[field for _, field, _ in shown].index("budget")] = "-"
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
            name, *numbers = cells(row, shown)
            name = name.replace(":", " :") if row["method"] in KNOWN else name  # it may wrap there
            table.add_row(Text(name), *map(Text, numbers))
    return tables


def markdown(rows: Sequence[Row]) -> str:
    lines = []
    for title, part in sections(rows):
        shown = columns(rows)
        head = [[heading for heading, *_ in shown], ["---", *["---:"] * (len(shown) - 1)]]
        body = [cells(row, shown) for row in part]
        lines += [f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in [*head, *body]), ""]
    return "\n".join(lines)
