"""A training run's curves, readable in black and white. Whoever imports this needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from secondguess.atomic import replacing

Line = dict[str, Any]
GREYS = ("0", "0.35", "0.55", "0.7", "0.8")  # of the unroll steps, the last for all further ones
DASHES = ("o-", "s--")  # of the levels; a run that was evaluated once has points alone
TAUS = (("held_out_tau", "ok-", "as served"), ("held_out_tau_m0", "ok--", "without second looks"))


def save_curves(lines: Sequence[Line], path: Path) -> None:
    """``lines`` of a log, one at least."""
    with replacing(path) as temporary:
        draw(lines).savefig(temporary, format="png", dpi=120)


def draw(lines: Sequence[Line]) -> Figure:
    """Loss and top-1, and the acceptance length if it was measured."""
    measured = any(line.get(name) is not None for line in lines for name, *_ in TAUS)
    figure = Figure(figsize=(8, 9 if measured else 6), layout="constrained")
    loss, top1, *rest = figure.subplots(3 if measured else 2, sharex=True)
    levels(loss, lines, "loss")
    levels(top1, lines, "top1_")
    loss.set_ylabel("held-out loss\n(dark: unroll step 0; dashed, squares: level 1)")
    top1.set_ylabel("held-out top-1")
    for tau in rest:
        for name, style, label in TAUS:
            curve(tau, [(line["step"], line.get(name)) for line in lines], style, label)
        tau.set_ylabel("held-out acceptance length")
    figure.axes[-1].set_xlabel("step")
    for axes in (loss, *rest):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


def levels(axes: Axes, lines: Sequence[Line], name: str) -> None:
    """A curve for each level and unroll step."""
    for level, dash in enumerate(DASHES):
        each = [(line["step"], line["held_out"].get(f"{name}{level}", [])) for line in lines]
        for j in range(max(len(values) for _, values in each)):
            points = [(step, values[j] if j < len(values) else None) for step, values in each]
            shade = GREYS[min(j, len(GREYS) - 1)]
            curve(axes, points, dash, f"level {level}" if j == 0 else "_", color=shade)


def curve(axes: Axes, points: Sequence[tuple[int, float | None]], style: str, label: str, **more: Any) -> None:
    """Points without a value are left out; a label that begins with ``_`` is in no legend."""
    known = [(step, value) for step, value in points if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), style, label=label, markersize=3, **more)
