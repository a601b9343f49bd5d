"""What ``secondguess growth`` measures, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from secondguess.bench.growth import ROUNDS, Point, measure, points, predicted, room, steeper, with_vocabulary
from secondguess.commands.progress import progress
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_for
from secondguess.drafter.cost_file import find_costs
from secondguess.drafter.model import Drafter
from secondguess.drafter.shipped import find_drafter
from secondguess.engine.thread import run
from secondguess.methods import open_drafter, packed_for_inference, parse_method
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console

BUDGET, CONTEXT, LARGEST_BATCH = 24, 256, 16
Row = dict[str, Any]


def grow(target: HFTarget, name: str | None, console: Console) -> list[Row]:
    """A row for each point of each axis."""
    method = parse_method("pr", TreeConfig(budget=BUDGET))
    own = run(open_drafter, method, target, name)
    folder = find_drafter(name, method.name, target.embedding)

    @cache
    def drafter_with(vocabulary: int) -> Drafter:
        if vocabulary == own.config.draft_vocab_size:
            return own
        return packed_for_inference(with_vocabulary(load_for(folder, target), vocabulary))

    tree = method.tree_for(own.config)
    costs = run(find_costs, target, own, tree, LARGEST_BATCH)
    base = Point(BUDGET, 1, CONTEXT, own.config.draft_vocab_size)
    by_axis = points(base, target.spec.context_len - room(0, tree), target.spec.vocab_size)
    wanted = list(dict.fromkeys(point for axis in by_axis.values() for point in axis))
    with progress(console) as bar:
        task = bar.add_task("cycles", total=ROUNDS * len(wanted))
        found = run(measure, target, drafter_with, tree, wanted, partial(bar.advance, task))
    return [row(axis, p, found[p], predicted(costs, tree, p)) for axis, line in by_axis.items() for p in line]


def row(axis: str, point: Point, milliseconds: float, by_model: float) -> Row:
    return {"axis": axis, "value": getattr(point, axis), "cycle_ms": milliseconds, "predicted_ms": by_model}


def by_axis(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {axis: [r for r in rows if r["axis"] == axis] for axis in dict.fromkeys(r["axis"] for r in rows)}


def rich_table(rows: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("axis", "cycle ms (the cost model's)", ""):
        table.add_column(heading)
    for axis, line in by_axis(rows).items():
        cells = ", ".join(f"{r['value']}: {r['cycle_ms']:.0f} ({r['predicted_ms']:.0f})" for r in line)
        more = "more than linear" if steeper([(r["value"], r["cycle_ms"]) for r in line]) else ""
        table.add_row(*map(Text, (axis, cells, more)))
    return table
