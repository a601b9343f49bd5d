"""The cells of every table and figure. Rows and columns are named as in ``bench.paper``. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from secondguess.bench.diagnosis import ALL, BUCKETS, NUM_BINS
from secondguess.bench.paper import BOTH, TABLE7, TASK_OF
from secondguess.config import TreeConfig
from secondguess.reproduce.arms import ARMS
from secondguess.reproduce.cells import At, Cell, Measurement, Place, Variant
from secondguess.reproduce.parts import Part, Scope, columns, heading, parts, setting

EAGLE, PR = ARMS["eagle3.1"], ARMS["pr"]
EAGLE_ROW, PR_ROW = "EAGLE-3.1", "PR"
PR_GAIN = f"{PR_ROW} over {EAGLE_ROW}"
BATCHES = (1, 2, 4, 8, 16)
BUDGETS, WIDTHS, OFFERS = (24, 32, 48, 64), (4, 6, 8, 10), (4, 6, 8, 10)  # of B_w and k, the paper's are not known


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
    """Shares, then how a second look changes the top-1 probability where it recovers the token and where not."""
    yield from diagnosed(scope, "table7", TABLE7)
    buckets = product((*BUCKETS, ALL), (*BUCKETS, ALL), ("change recovered", "change unrecovered"))
    places = [(f"drafter {drafter}", f"target {target}", quantity) for drafter, target, quantity in buckets]
    yield from diagnosed(scope, "table7", places, ": mean change of the drafter's top-1 probability")


def figure1(scope: Scope) -> Iterator[Cell]:
    bins = [f"drafter {b / NUM_BINS:.1f}-{(b + 1) / NUM_BINS:.1f}" for b in range(NUM_BINS)]
    unsure = ("drafter < 0.5", "drafter < 0.5, target >= 0.9")
    places = [(row, "accepted", "share") for row in bins] + [(row, "rejected", "share") for row in unsure]
    yield from diagnosed(scope, "figure1", places)


def diagnosed(scope: Scope, table: str, places: Iterable[tuple[str, str, str]], what: str = "") -> Iterator[Cell]:
    """Cells of a diagnosis over all tasks, one per temperature: its chains are the same whatever the budget."""
    why, tasks = scope.why_not([PR], list(TASK_OF.values()), 1), tuple(scope.sizes)
    budget = max(scope.budgets or (48,))
    for temperature, (row, column, quantity) in product(scope.temperatures or (0.0,), places):
        measurement = Measurement("diagnosis", PR, tasks, At(budget, temperature))
        place = Place(table, f"T = {temperature:g}{what}", row, column, quantity)
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
