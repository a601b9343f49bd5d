"""The figure of ``growth``. Whoever imports this needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from secondguess.commands.growth_run import by_axis
from secondguess.commands.plots import save

__all__ = ["draw", "save"]

LABELS = {
    "budget": "budget (draft tokens verified)",
    "batch": "requests decoded together",
    "context": "tokens before the draft",
    "vocabulary": "draft vocabulary",
}


def draw(rows: Sequence[dict[str, Any]], setting: str) -> Figure:
    """A panel for each axis, all from zero."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    figure.suptitle(f"A cycle's time; {setting}", fontsize=10)
    for axes, (axis, line) in zip(figure.subplots(2, 2).flat, by_axis(rows).items(), strict=True):
        x = [r["value"] for r in line]
        axes.plot(x, [r["cycle_ms"] for r in line], "ok-", label="measured")
        axes.plot(x, [r["predicted_ms"] for r in line], "--", color="0.5", label="cost model")
        axes.set_xlabel(LABELS[axis])
        axes.set_ylabel("cycle, ms")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", fontsize=8)
    return figure
