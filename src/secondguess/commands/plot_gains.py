"""Gains of a table's rows, ours with intervals and the paper's beside them. Whoever imports this needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from secondguess.reproduce.outcome import Outcome

MARKERS = "osD^v"
WIDTH = 7.5  # inches, so that letters keep their size on a page
SPREAD = 0.6  # of the distance between two places on the axis, for the points of one place


def draw_gains(outcomes: Sequence[Outcome], title: str) -> Figure | None:
    """A panel per part of the table (down) and quantity (across); None if no gain was measured."""
    gains = [o for o in outcomes if o.cell.place.quantity.endswith(" gain") and o.value is not None]
    if not gains:
        return None
    parts, quantities = names_of(gains, "part"), names_of(gains, "quantity")
    figure = Figure(figsize=(WIDTH, 2.7 * len(parts) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(parts), len(quantities), squeeze=False)
    for i, part in enumerate(parts):
        for j, quantity in enumerate(quantities):
            axes[i, j].set_title(f"{quantity}, {part}", fontsize=9)
            panel([o for o in gains if (o.cell.place.part, o.cell.place.quantity) == (part, quantity)], axes[i, j])
    legend(figure)
    return figure


def legend(figure: Figure) -> None:
    """One for all panels, where it hides no point."""
    pairs = [pair for axes in figure.axes for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True)]
    named = dict(pairs)
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=2, fontsize=8)


def names_of(gains: Sequence[Outcome], what: str) -> list[str]:
    return list(dict.fromkeys(getattr(o.cell.place, what) for o in gains))


def panel(gains: Sequence[Outcome], axes: Axes) -> None:
    """Columns along the axis and a marker per row, or the other way round where there is one column."""
    if not gains:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    columns, rows = names_of(gains, "column"), names_of(gains, "row")
    one = len(columns) == 1
    along, kinds = (rows, columns) if one else (columns, rows)
    axes.axhline(0, color="black", linewidth=0.8)
    for o in gains:
        p = o.cell.place
        name, kind = (p.row, p.column) if one else (p.column, p.row)
        where = along.index(name) + SPREAD * ((2 * kinds.index(kind) + 1) / (2 * len(kinds)) - 0.5)
        points(o, axes, where, SPREAD / (3 * len(kinds)), MARKERS[kinds.index(kind) % len(MARKERS)], kind)
    axes.set_xticks(range(len(along)), along, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("gain, %", fontsize=8)


def points(o: Outcome, axes: Axes, where: float, apart: float, marker: str, kind: str) -> None:
    value = o.value
    assert value is not None
    whiskers = None
    if value.low is not None and value.high is not None:
        whiskers = [[100 * max(value.value - value.low, 0)], [100 * max(value.high - value.value, 0)]]
    style: dict[str, Any] = {"color": "black", "markersize": 5, "capsize": 3, "linestyle": "none"}
    axes.errorbar([where], [100 * value.value], whiskers, marker=marker, label=kind, **style)
    if o.paper is not None:
        label = f"{kind}, the paper's"
        axes.errorbar([where + apart], [100 * o.paper], marker=marker, markerfacecolor="white", label=label, **style)
