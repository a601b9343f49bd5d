"""The cells of every table and figure. Rows and columns are named as in ``bench.paper``. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from secondguess.bench.diagnosis import NUM_BINS
from secondguess.bench.paper import AVERAGE, BOTH, TABLE7, TASK_OF
from secondguess.config import TreeConfig
from secondguess.reproduce.arms import ARMS
from secondguess.reproduce.cells import BASE_OF, KINDS, At, Cell, Measurement, Place, Variant

EAGLE, PR = ARMS["eagle3.1"], ARMS["pr"]
EAGLE_ROW, PR_ROW = "EAGLE-3.1", "PR"
PR_GAIN = f"{PR_ROW} over {EAGLE_ROW}"
BATCHES = (1, 2, 4, 8, 16)
BUDGETS, WIDTHS, OFFERS = (24, 32, 48, 64), (4, 6, 8, 10), (4, 6, 8, 10)  # of B_w and k, the paper's are not known

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
        if why := self.scope.why_not(variants, tasks, self.at.batch_size):
            return Cell(place, why=why)
        there, kind = self.scope.with_room(tasks, self.at.batch_size), KINDS[BASE_OF.get(quantity, quantity)]
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


def table1(scope: Scope) -> Iterator[Cell]:
    for part in parts(scope, "table1", (24, 48), (0.0, 1.0)):
        yield from part.compare({EAGLE_ROW: EAGLE, PR_ROW: PR}, {PR_ROW: EAGLE_ROW}, columns(*TASK_OF))


def table2(scope: Scope) -> Iterator[Cell]:
    for at in scope.settings((48,), (0.0,)):
        for task, batch_size in product(("GSM8K", "MT-Bench", "LCB"), BATCHES):
            part = Part(scope, "table2", heading(at), replace(at, batch_size=batch_size))
            rows = {f"{task}, {EAGLE_ROW}": EAGLE, f"{task}, {PR_ROW}": PR}
            over = {f"{task}, {PR_ROW}": f"{task}, {EAGLE_ROW}"}
            yield from part.compare(rows, over, {f"n = {batch_size}": [TASK_OF[task]]}, ("speedup",))


def table3(scope: Scope) -> Iterator[Cell]:
    rows = {
        EAGLE_ROW: EAGLE,
        PR_ROW: PR,
        "PR, no balance term": ARMS["no-balance"],
        "PR, no self-query": ARMS["no-self-query"],
        "EAGLE-3.1, two layers": ARMS["two-layer"],
    }
    for part in parts(scope, "table3", (48,), (0.0,)):
        yield from part.compare(rows, dict.fromkeys(list(rows)[1:], EAGLE_ROW), columns("GSM8K", "LCB", "MBPP"))


def table4(scope: Scope) -> Iterator[Cell]:
    rows = {
        EAGLE_ROW: EAGLE,
        "+ advance 3 more": setting(EAGLE, "extra_advance", 3),
        "widen to B_w = 9": setting(EAGLE, "grow_width", 9),
        "PR, m = 0": replace(PR, method="pr:m=0"),
        PR_ROW: PR,
    }
    for part in parts(scope, "table4", (48,), (1.0,)):
        yield from part.compare(rows, dict.fromkeys(list(rows)[1:], EAGLE_ROW), columns("GSM8K", "LCB", "MT-Bench"))


def table5(scope: Scope) -> Iterator[Cell]:
    """One of budget, grow width and offer width at a time; a row per size."""
    for at in scope.settings(BUDGETS, (0.0,)):
        yield from sized(Part(scope, "table5", f"T = {at.temperature:g}", at), f"B = {at.budget}", EAGLE, PR)
    for at in scope.settings((48,), (0.0,)):
        for name, title, sizes in (("grow_width", "B_w", WIDTHS), ("offer_width", "k", OFFERS)):
            part = Part(scope, "table5", f"{title}, at {heading(at)}", at)
            for size in sizes:
                yield from sized(part, f"{title} = {size}", setting(EAGLE, name, size), setting(PR, name, size))


def sized(part: Part, row: str, eagle: Variant, pr: Variant) -> Iterator[Cell]:
    tasks = [TASK_OF["GSM8K"]]
    for quantity in BOTH:
        yield part.cell(row, EAGLE_ROW, quantity, tasks, eagle)
        yield part.cell(row, PR_ROW, quantity, tasks, pr)
        yield part.cell(row, PR_GAIN, f"{quantity} gain", tasks, pr, eagle)


def table6(scope: Scope) -> Iterator[Cell]:
    rows = {"HASS": ARMS["hass"], "HASS + PR": ARMS["hass+pr"]}
    for part in parts(scope, "table6", (48,), (0.0,)):
        yield from part.compare(rows, {"HASS + PR": "HASS"}, columns(*TASK_OF))


def table7(scope: Scope) -> Iterator[Cell]:
    yield from diagnosed(scope, "table7", TABLE7)


def figure1(scope: Scope) -> Iterator[Cell]:
    bins = [f"drafter {b / NUM_BINS:.1f}-{(b + 1) / NUM_BINS:.1f}" for b in range(NUM_BINS)]
    unsure = ("drafter < 0.5", "drafter < 0.5, target >= 0.9")
    places = [(row, "accepted", "share") for row in bins] + [(row, "rejected", "share") for row in unsure]
    yield from diagnosed(scope, "figure1", places)


def diagnosed(scope: Scope, table: str, places: Iterable[tuple[str, str, str]]) -> Iterator[Cell]:
    """Cells of one diagnosis over all tasks. Budget and temperature bear on its trees and texts."""
    why, tasks = scope.why_not([PR], list(TASK_OF.values()), 1), tuple(scope.sizes)
    for at in scope.settings((48,), (0.0,)):
        measurement = Measurement("diagnosis", PR, tasks, at)
        for row, column, quantity in places:
            place = Place(table, heading(at), row, column, quantity)
            yield Cell(place, why=why) if why else Cell(place, (measurement,))


def table8(scope: Scope) -> Iterator[Cell]:
    """The sets and their sizes as found."""
    for label, task in TASK_OF.items():
        place = Place("table8", "full sets", "rows", label, "count")
        known = scope.sizes.get(task)
        yield Cell(place, known=known, why=scope.lacking_tasks.get(task, ""))


def table9(scope: Scope) -> Iterator[Cell]:
    """Also the other reading of the paper's N (3 second looks a draft, not a step), and second looks in series."""
    serial, once = replace(PR, serial=True), replace(PR, method="pr:reconsider_cap=3")
    rows = {EAGLE_ROW: EAGLE, PR_ROW: PR, "PR, 3 a draft": once, "PR, in series": serial}
    for at in scope.settings((24, 48), (0.0,)):
        part, column = Part(scope, "table9", f"T = {at.temperature:g}", at), f"B = {at.budget}"
        for row, variant in rows.items():
            yield part.cell(row, column, "cycle ms", [TASK_OF["GSM8K"]], variant)
        for row in list(rows)[1:]:
            ratio = f"{row} / {EAGLE_ROW}"
            yield part.cell(ratio, column, "cycle ratio", [TASK_OF["GSM8K"]], rows[row], EAGLE)
        steps = TreeConfig().num_steps
        for name, passes in (("3 serial passes a draft", 3), ("a serial pass every step", steps - 1)):
            place = Place("table9", part.title, name, column, "bound")
            yield Cell(place, known=(steps + passes) / steps)


BUILDERS: dict[str, Callable[[Scope], Iterator[Cell]]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "table6": table6,
    "table7": table7,
    "table8": table8,
    "table9": table9,
    "figure1": figure1,
}


def cells_of(name: str, scope: Scope) -> list[Cell]:
    """The cells of a table or figure, or of ``all``, in the order in which they are shown."""
    names = list(BUILDERS) if name == "all" else [name]
    return [cell for each in names for cell in BUILDERS[each](scope)]
