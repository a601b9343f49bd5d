"""The figures of ``diagnose``, readable in black and white. Whoever imports this needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from secondguess.atomic import replacing
from secondguess.bench.diagnosis import ALL, BUCKET_EDGES, BUCKETS, Bin, Diagnosis, Share

LIGHT, DARK = "0.85", "0.35"
INTERVAL = "95 % Wilson interval"
APART = 0.015  # so that two whiskers of a bin do not hide each other


def draw(d: Diagnosis, setting: str) -> Mapping[str, Figure]:
    """Every figure, by the name of its file. ``setting`` is printed above each."""
    plots: dict[str, Callable[[Diagnosis, Figure], None]] = {
        "figure1a": acceptance,
        "figure1b": rejections,
        "depths": depths,
        "calibration": calibration,
    }
    figures = {}
    for name, plot in plots.items():
        figures[name] = figure = Figure(figsize=(7.5, 5), layout="constrained")
        figure.suptitle(setting, fontsize=9)
        plot(d, figure)
    return figures


def save(figure: Figure, folder: Path, name: str) -> None:
    """As PNG and as SVG; the same figure gives the same SVG."""
    with replacing(folder / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    same = matplotlib.rc_context({"svg.hashsalt": "secondguess"})
    with replacing(folder / f"{name}.svg") as temporary, same:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def acceptance(d: Diagnosis, figure: Figure) -> None:
    axes = figure.subplots()
    for b in d.figure1a:
        bar(axes, (b.low + b.high) / 2, b.true, 0.08)
    diagonal(axes, "accepted as often as expected")
    labels = [f"{b.low:.1f}-{b.high:.1f}\n{b.true.count:,}" for b in d.figure1a]
    axes.set_xticks([(b.low + b.high) / 2 for b in d.figure1a], labels, fontsize=8)
    total = sum(b.true.count for b in d.figure1a)
    axes.set_xlabel(f"drafter's top-1 probability; below: number of drafted tokens ({total:,} in all)")
    axes.set_ylabel(f"accepted, % of tokens ({INTERVAL})")
    axes.set_title("Figure 1a: acceptance against the drafter's confidence")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 100)
    axes.legend(loc="upper left")


def rejections(d: Diagnosis, figure: Figure) -> None:
    axes = figure.subplots()
    percents = 100 * np.array(d.figure1b) / max(d.rejected, 1)
    image = axes.imshow(percents, origin="lower", extent=(0, 1, 0, 1), cmap="Greys", vmin=0, aspect="auto")
    figure.colorbar(image, ax=axes, label="% of rejected tokens, per cell")
    for edge in BUCKET_EDGES:
        axes.axvline(edge, color="black", linewidth=1)
        axes.axhline(edge, color="black", linewidth=1)
    middles = [(a + b) / 2 for a, b in pairwise((0, *BUCKET_EDGES, 1))]
    centre = dict(zip(BUCKETS, middles, strict=True))
    box = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.5, "boxstyle": "round,pad=0.2"}
    for cell in d.table7:
        if ALL not in (cell.drafter, cell.target):
            at = centre[cell.target], centre[cell.drafter]
            axes.text(*at, percent(cell.pool), ha="center", va="center", fontsize=8, bbox=box)
    axes.set_xlabel("target's top-1 probability")
    axes.set_ylabel("drafter's top-1 probability")
    axes.set_title(f"Figure 1b: {d.rejected:,} rejected tokens (boxes: % in each bucket of Table 7)", fontsize=11)


def depths(d: Diagnosis, figure: Figure) -> None:
    top, bottom = figure.subplots(2, sharex=True)
    for depth in d.depths:
        refined, total = depth.refined.hits, depth.refined.count
        top.bar(depth.depth, total - refined, color=LIGHT, edgecolor="black", label="level 0")
        top.bar(depth.depth, refined, bottom=total - refined, color=DARK, edgecolor="black", label="refined")
        bar(bottom, depth.depth, depth.refined, 0.8)
    named = dict(zip(*reversed(top.get_legend_handles_labels()), strict=True))
    top.legend(named.values(), named.keys())
    top.set_ylabel("accepted tokens")
    top.set_title("Where refined tokens sit in accepted paths")
    bottom.set_ylabel(f"refined, % of accepted\n({INTERVAL})")
    bottom.set_xticks([x.depth for x in d.depths], [f"{x.depth}\n{x.refined.count:,}" for x in d.depths])
    bottom.set_xlabel("depth in the tree (tokens after the root); below: number of accepted tokens")


def calibration(d: Diagnosis, figure: Figure) -> None:
    axes = figure.subplots()
    points(axes, d.calibration[ALL], "o", "black", "all nodes")
    points(axes, d.calibration["refined"], "^", "white", f"refined nodes (drawn {APART} to the right)", APART)
    diagonal(axes, "calibrated")
    pairs = list(zip(d.calibration[ALL], d.calibration["refined"], strict=True))
    labels = [f"{b.low:.1f}-{b.high:.1f}\n{b.true.count:,}\n{r.true.count:,}" for b, r in pairs]
    axes.set_xticks([(b.low + b.high) / 2 for b, _ in pairs], labels, fontsize=8)
    axes.set_xlabel("probability of the path from the root, mean of a bin; below: number of nodes, of refined nodes")
    axes.set_ylabel(f"on the target's path, % of nodes ({INTERVAL})")
    axes.set_title("Calibration of path scores")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 103)  # a whole marker at 100
    axes.legend(loc="upper left")


def bar(axes: Axes, x: float, share: Share, width: float) -> None:
    if not share.count:
        return
    y, below, above = (100 * part for part in whiskers(share))
    axes.bar(x, y, width, yerr=[[below], [above]], color=LIGHT, edgecolor="black", capsize=3)


def points(axes: Axes, bins: Sequence[Bin], marker: str, face: str, label: str, shift: float = 0) -> None:
    rows = [(b.mean, *whiskers(b.true)) for b in bins if b.true.count]
    x, y, below, above = np.array(rows, dtype=float).reshape(-1, 4).T
    whisker = [100 * below, 100 * above]
    fmt = f"{marker}k"  # no line
    axes.errorbar(x + shift, 100 * y, whisker, fmt=fmt, markerfacecolor=face, capsize=3, label=label)


def diagonal(axes: Axes, label: str) -> None:
    axes.plot([0, 1], [0, 100], color="black", linestyle="--", linewidth=0.8, label=label)


def whiskers(share: Share) -> tuple[float, float, float]:
    """A share, and how far its interval reaches below and above."""
    assert share.share is not None
    assert share.low is not None
    assert share.high is not None
    return share.share, share.share - share.low, share.high - share.share


def percent(share: Share) -> str:
    return "-" if share.share is None else f"{share.share:.1%}"
