"""A chapter of the report: what cycles cost at the shapes of the paper's models, by ``scripts/gpu_check.sh``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from secondguess.bench.gpu.cycles import SERIAL, Case
from secondguess.bench.gpu.models import SHAPES
from secondguess.bench.paper import PAPER
from secondguess.errors import UserError
from secondguess.reproduce.layout import FORMATS, Chapter, Grid, Line, Number

ROWS = {"eagle3.1": "EAGLE-3.1", "pr": "PR", SERIAL: "PR, in series"}  # by method, as ``tables`` names them
UNKNOWN = "not measured: needs a GPU (scripts/gpu_check.sh, 8 minutes), and --costs FILE with its result.json"
ABOUT = (
    "Tables 9 and 2 on {where}, revision {revision}: random weights, which cost what trained ones do. What is accepted "
    "is played by the acceptance lengths of the paper's Table 5: speedups are what these cycles would give with them."
)

Results = Mapping[Case, Mapping[str, Any]]


def costs_chapter(path: Path | None) -> Chapter:
    """``path``: that script's ``result.json``. Raises UserError if it is something else."""
    if path is None:
        return chapter(UNKNOWN, [])
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        gpus = found["record"]["machine"]["gpus"]
        where = ", ".join(gpus) if gpus else "no GPU but a CPU, with tiny shapes, which says nothing of one"
        grids = [grid for model in SHAPES if model in found for grid in grids_of(model, found[model])]
        about = ABOUT.format(where=where, revision=found["record"]["revision"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--costs {path} is no result.json of scripts/gpu_check.sh: {error!r}") from error
    return chapter(about, grids)


def chapter(about: str, grids: list[Grid]) -> Chapter:
    return Chapter("GPU costs", "At the shapes of the paper's models", about, grids, [])


def grids_of(model: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Grid]:
    results = {Case(row["method"], row["budget"], row["num_requests"]): row for row in rows}
    budgets = sorted({case.budget for case in results if case.method != "ar"})
    sizes = sorted({case.num_requests for case in results})
    yield cycles(model, results, budgets)
    yield speedups(model, results, max(budgets), sizes)


def cycles(model: str, results: Results, budgets: Sequence[int]) -> Grid:
    """Milliseconds, and their ratio to EAGLE-3.1's."""
    columns, lines = [f"B = {budget}" for budget in budgets], []
    for method, label in ROWS.items():
        fields = []
        for budget in budgets:
            ms, base = (results[Case(name, budget, 1)]["cycle_ms"] for name in (method, "eagle3.1"))
            fields.append([number("cycle ms", ms), number("cycle ratio", ms / base)])
        lines += [Line(label, "here", fields), *paper_lines("table9", model, label, columns)]
    return Grid(f"{model}, a cycle of one request, and over EAGLE-3.1's (Table 9)", columns, lines, [])


def speedups(model: str, results: Results, budget: int, sizes: Sequence[int]) -> Grid:
    columns, lines = [f"n = {size}" for size in sizes], []
    for method in ("eagle3.1", "pr"):
        pairs = [(results[Case(method, budget, size)], results[Case("ar", 0, size)]) for size in sizes]
        gains = [ours["tokens_per_second"] / plain["tokens_per_second"] for ours, plain in pairs]
        lines.append(Line(ROWS[method], "here", [[number("speedup", gain)] for gain in gains]))
        for task in ("GSM8K", "MT-Bench", "LCB"):
            lines += paper_lines("table2", model, f"{task}, {ROWS[method]}", columns)
    return Grid(f"{model}, speedup over plain decoding, B = {budget} (Table 2)", columns, lines, [])


def paper_lines(table: str, model: str, label: str, columns: Sequence[str]) -> list[Line]:
    """The paper's own row, if it is of this model."""
    paper = PAPER[table]
    if paper.model != model:
        return []
    wanted = {"table9": ((label, "cycle ms"), (f"{label} / EAGLE-3.1", "cycle ratio")), "table2": ((label, "speedup"),)}
    keys = [[(row, column, quantity) for row, quantity in wanted[table]] for column in columns]
    fields = [[number(k[2], paper.numbers[k], "paper") for k in field if k in paper.numbers] for field in keys]
    return [Line(label, "paper", fields)] if any(fields) else []


def number(quantity: str, value: float, source: str = "here") -> Number:
    return Number(FORMATS[quantity].format(value), "", "measured" if source == "here" else "paper")
