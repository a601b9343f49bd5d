"""What there is to measure with, and the cells of one grid of a table. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from secondguess.bench.paper import AVERAGE, BOTH, TASK_OF
from secondguess.config import TreeConfig
from secondguess.drafter.replayed import is_static
from secondguess.methods import parse_method
from secondguess.reproduce.cells import BASE_OF, KINDS, At, Cell, Measurement, Place, Variant

Columns = Mapping[str, Sequence[str]]  # by heading, the tasks that are averaged


@dataclass(frozen=True, slots=True)
class Scope:
    """What there is: tasks with their sizes, and why tasks and drafters are lacking.

    ``budgets`` and ``temperatures`` stand in for those that the paper holds fixed, if they are given.
    """

    sizes: Mapping[str, int]
    lacking_tasks: Mapping[str, str]
    lacking_drafters: Mapping[str, str]
    budgets: tuple[int, ...] | None = None
    temperatures: tuple[float, ...] | None = None
    drafts_as_graphs: bool = False  # CUDA graphs, as far as their shapes stay the same

    def as_in_the_paper(self) -> Scope:
        return replace(self, budgets=None, temperatures=None)

    def settings(self, budgets: Sequence[int], temperatures: Sequence[float]) -> list[At]:
        return [At(b, t) for b, t in product(self.budgets or budgets, self.temperatures or temperatures)]

    def why_not(self, variants: Sequence[Variant], tasks: Sequence[str], batch_size: int) -> str:
        """Empty if all variants can be measured on some of the tasks."""
        for variant in variants:
            if variant.drafter in self.lacking_drafters:
                return self.lacking_drafters[variant.drafter]
        if not any(task in self.sizes for task in tasks):
            return "; ".join(self.lacking_tasks[task] for task in tasks)
        if not self.with_room(tasks, batch_size):
            return f"there are not {batch_size} prompts to decode together"
        return ""

    def why_not_timed(self, variants: Sequence[Variant], at: At) -> str:
        """Empty if the times of all variants can be compared."""
        for variant in variants if self.drafts_as_graphs else ():
            if not is_static(parse_method(variant.method, TreeConfig(budget=at.budget)).tree):
                return f"{variant.method} cannot be drafted as a CUDA graph, as the others are: times would not compare"
        return ""

    def with_room(self, tasks: Sequence[str], batch_size: int) -> list[str]:
        return [task for task in tasks if self.sizes.get(task, 0) >= batch_size]


@dataclass(frozen=True, slots=True)
class Part:
    """A grid of cells that share budget and temperature."""

    scope: Scope
    table: str
    title: str
    at: At

    def cell(
        self, row: str, column: str, quantity: str, tasks: Sequence[str], variant: Variant, base: Variant | None = None
    ) -> Cell:
        """``base``: what a gain or a ratio is counted over."""
        place = Place(self.table, self.title, row, column, quantity)
        variants = [variant] if base is None else [variant, base]
        kind = KINDS[BASE_OF.get(quantity, quantity)]
        why = self.scope.why_not(variants, tasks, self.at.batch_size)
        if not why and kind == "live":
            why = self.scope.why_not_timed(variants, self.at)
        if why:
            return Cell(place, why=why)
        there = self.scope.with_room(tasks, self.at.batch_size)
        ours, *over = (tuple(Measurement(kind, v, (task,), self.at) for task in there) for v in variants)
        return Cell(place, ours, over[0] if over else ())

    def compare(
        self, rows: Mapping[str, Variant], over: Mapping[str, str], columns: Columns, quantities: Sequence[str] = BOTH
    ) -> Iterator[Cell]:
        """Every row on every column; then what rows gain ``over`` others."""
        for (row, variant), (column, tasks) in product(rows.items(), columns.items()):
            yield from (self.cell(row, column, quantity, tasks, variant) for quantity in quantities)
        for (row, base), (column, tasks) in product(over.items(), columns.items()):
            for quantity in quantities:
                name, gain = f"{row} over {base}", f"{quantity} gain"
                yield self.cell(name, column, gain, tasks, rows[row], rows[base])


def columns(*labels: str) -> Columns:
    """A column per task, and their average."""
    return {label: [TASK_OF[label]] for label in labels} | {AVERAGE: [TASK_OF[label] for label in labels]}


def heading(at: At) -> str:
    return f"B = {at.budget}, T = {at.temperature:g}"


def setting(variant: Variant, name: str, value: int) -> Variant:
    """``variant`` with one setting of its tree changed, or as it is if that is the default."""
    if value == getattr(TreeConfig(), name):
        return variant
    return replace(variant, method=f"{variant.method}:{name}={value}")


def parts(scope: Scope, table: str, budgets: Sequence[int], temperatures: Sequence[float]) -> Iterator[Part]:
    for at in scope.settings(budgets, temperatures):
        yield Part(scope, table, heading(at), at)
