"""What the paper (arXiv 2611.05724v1) prints in its tables and captions, as far as it is known. Data only.

Rows, columns and quantities are named as in ``secondguess.reproduce.tables``. Shares and gains are fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from secondguess.bench.tasks import ORDER

Numbers = dict[tuple[str, str, str], float]  # by row, column and quantity

TASK_OF = dict(zip(("GSM8K", "MATH-500", "AIME25", "HumanEval", "MBPP", "LCB", "MT-Bench"), ORDER, strict=True))
AVERAGE = "Avg"
IN_PERCENT = ("tau gain", "speedup gain", "recovered", "pool", "share")
# PR's average gains, over models and benchmarks: the least and the largest.
HEADLINE = {"tau gain": (0.053, 0.102), "speedup gain": (0.035, 0.092)}


@dataclass(frozen=True, slots=True)
class Table:
    """A table or figure. ``budget`` and ``temperature``: what its numbers were measured at, if it has only one."""

    title: str
    model: str
    numbers: Mapping[tuple[str, str, str], float]
    budget: int | None = None
    temperature: float | None = None


def grid(columns: Sequence[str], quantities: Sequence[str], text: str) -> Numbers:
    """``text``: a row a line, ``name | cell | cell``; a cell has a number per quantity, with ``/`` between them."""
    numbers: Numbers = {}
    for line in text.strip().splitlines():
        row, *cells = (part.strip() for part in line.split("|"))
        for column, cell in zip(columns, cells, strict=True):
            for quantity, number in zip(quantities, cell.split("/"), strict=True):
                numbers[row, column, quantity] = float(number) / (100 if quantity in IN_PERCENT else 1)
    return numbers


def with_gains(numbers: Numbers, over: Mapping[str, str]) -> Numbers:
    """Add what one row gains over another, ``{row: other}``, where it is not printed."""
    gains: Numbers = {}
    for (row, column, quantity), value in numbers.items():
        other = over.get(row)
        if other is not None and (base := numbers.get((other, column, quantity))):
            gains[f"{row} over {other}", column, f"{quantity} gain"] = value / base - 1
    return gains | numbers


BOTH = ("tau", "speedup")
GAINS = ("tau gain", "speedup gain")

TABLE1 = grid(
    (*TASK_OF, AVERAGE),
    BOTH,
    """
    EAGLE-3.1 | 4.41/1.90 | 4.70/2.14 | 5.41/2.29 | 5.15/2.25 | 4.97/2.24 | 4.31/1.78 | 4.20/1.69 | 4.74/2.04
    PR        | 4.73/2.03 | 4.77/2.16 | 5.36/2.28 | 5.45/2.38 | 5.28/2.37 | 4.78/1.95 | 4.65/1.85 | 5.00/2.15
    """,
) | grid(
    (*TASK_OF, AVERAGE),
    GAINS,
    "PR over EAGLE-3.1 | 7.3/6.8 | 1.5/0.9 | -0.9/-0.4 | 5.8/5.8 | 6.2/5.8 | 10.9/9.6 | 10.7/9.5 | 5.5/5.4",
)

TABLE2 = with_gains(
    grid(
        ("n = 1", "n = 2", "n = 4", "n = 8", "n = 16"),
        ("speedup",),
        """
        GSM8K, EAGLE-3.1    | 2.05 | 1.68 | 1.62 | 1.26 | 1.12
        GSM8K, PR           | 2.26 | 1.91 | 1.91 | 1.46 | 1.22
        MT-Bench, EAGLE-3.1 | 2.03 | 1.71 | 1.71 | 1.50 | 1.41
        MT-Bench, PR        | 2.05 | 1.79 | 1.77 | 1.56 | 1.51
        LCB, EAGLE-3.1      | 1.95 | 1.61 | 1.60 | 1.40 | 1.31
        """,
    ),
    {f"{task}, PR": f"{task}, EAGLE-3.1" for task in ("GSM8K", "MT-Bench")},
)

TABLE3 = with_gains(
    grid(
        ("GSM8K", "LCB", "MBPP", AVERAGE),
        BOTH,
        """
        EAGLE-3.1           | 4.84/2.05 | 4.70/1.95 | 5.32/2.33 | 4.95/2.11
        PR                  | 5.40/2.26 | 5.11/2.11 | 5.57/2.41 | 5.36/2.26
        PR, no balance term | 5.17/2.14 | 5.03/2.04 | 5.58/2.41 | 5.26/2.20
        PR, no self-query   | 5.03/2.10 | 4.92/2.02 | 5.47/2.35 | 5.14/2.16
        """,
    ),
    dict.fromkeys(("PR", "PR, no balance term", "PR, no self-query"), "EAGLE-3.1"),
)

TABLE4 = with_gains(
    grid(
        ("GSM8K", "LCB", "MT-Bench", AVERAGE),
        BOTH,
        """
        EAGLE-3.1        | 5.44/2.81 | 5.54/3.13 | 3.40/1.64 | 4.79/2.53
        + advance 3 more | 5.51/2.83 | 5.68/3.17 | 3.43/1.64 | 4.87/2.55
        widen to B_w = 9 | 5.49/2.82 | 5.61/3.15 | 3.42/1.64 | 4.84/2.54
        """,
    ),
    dict.fromkeys(("+ advance 3 more", "widen to B_w = 9"), "EAGLE-3.1"),
)


def table5() -> Numbers:
    """Its rows are tree sizes, so a gain is a column."""
    numbers = grid(
        ("EAGLE-3.1", "PR"),
        BOTH,
        """
        B = 24 | 4.39/1.94   | 4.83/2.11
        B = 32 | 4.606/2.077 | 4.869/2.208
        B = 48 | 4.835/2.184 | 5.127/2.291
        B = 64 | 4.961/2.195 | 5.222/2.280
        """,
    )
    gains = {
        (row, "PR over EAGLE-3.1", f"{quantity} gain"): value / numbers[row, "EAGLE-3.1", quantity] - 1
        for (row, column, quantity), value in numbers.items()
        if column == "PR"
    }
    return numbers | gains


TABLE6 = with_gains(
    grid(
        (*TASK_OF, AVERAGE),
        BOTH,
        """
        HASS      | 4.81/2.03 | 4.84/2.11 | 5.21/2.27 | 5.59/2.38 | 5.34/2.38 | 4.68/1.90 | 4.64/1.97 | 5.02/2.15
        HASS + PR | 5.17/2.12 | 5.21/2.21 | 5.88/2.49 | 5.86/2.45 | 5.67/2.44 | 4.99/1.98 | 4.97/2.02 | 5.39/2.24
        """,
    ),
    {"HASS + PR": "HASS"},
)

TABLE7 = grid(
    ("target < 0.5", "target 0.5-0.9", "target >= 0.9", "target all"),
    ("recovered", "pool"),
    """
    drafter < 0.5   | 17.7/18.5 | 29.5/26.6 | 39.7/17.0 | 28.8/62.1
    drafter 0.5-0.9 | 11.3/6.7  | 23.4/13.6 | 42.0/15.1 | 29.0/35.4
    drafter >= 0.9  | 3.7/0.4   | 6.9/1.3   | 27.1/0.8  | 12.9/2.5
    drafter all     | 16.4/25.6 | 26.7/41.5 | 39.9/32.9 | 28.5/100
    """,
)

# The size of LiveCodeBench is not known.
SIZES = {"GSM8K": 1319, "MATH-500": 500, "AIME25": 30, "HumanEval": 164, "MBPP": 500, "MT-Bench": 80}
TABLE8 = {("rows", name, "count"): float(size) for name, size in SIZES.items()}

TABLE9 = (
    grid(("B = 24", "B = 48"), ("cycle ms",), "EAGLE-3.1 | 25.55 | 26.03 \n PR | 25.94 | 26.60")
    | grid(("B = 24", "B = 48"), ("cycle ratio",), "PR / EAGLE-3.1 | 1.015 | 1.022")
    | grid(("B = 24", "B = 48"), ("bound",), "3 serial passes a draft | 1.375 | 1.375")
)

# Its bins are not known: "confident" and "least confident" are taken for the outer ones of ten.
FIGURE1 = {
    ("drafter 0.0-0.1", "accepted", "share"): 0.073,
    ("drafter 0.9-1.0", "accepted", "share"): 0.956,
    ("drafter < 0.5", "rejected", "share"): 0.621,
    ("drafter < 0.5, target >= 0.9", "rejected", "share"): 0.170,
}

LLAMA, QWEN, GEMMA = "Llama-3.1-8B", "Qwen3-8B", "Gemma-3-12B"
PAPER = {
    "table1": Table("Acceptance length and speedup on seven tasks", LLAMA, TABLE1, 24, 0.0),
    "table2": Table("Speedup when n requests are batched", LLAMA, TABLE2, 48, 0.0),
    "table3": Table("What PR's parts bring", LLAMA, TABLE3, 48, 0.0),
    "table4": Table("Reconsidering against drafting wider", GEMMA, TABLE4, 48, 1.0),
    "table5": Table("Tree settings", QWEN, table5(), None, 0.0),
    "table6": Table("PR on top of HASS", LLAMA, TABLE6, 48, 0.0),
    "table7": Table("What reconsideration recovers of rejected tokens", "an unknown model", TABLE7),
    "table8": Table("Benchmarks", "", TABLE8),
    "table9": Table("What co-forwarding costs in a cycle", QWEN, TABLE9, None, 0.0),
    "figure1": Table("Where one pass fails", "an unknown model", FIGURE1),
}
