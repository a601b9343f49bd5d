#!/usr/bin/env python3
"""What a cycle costs beside its matrix products, and a PR cycle beside an EAGLE-3.1 cycle. Nothing else may run.

    scripts/perf.py OUT [--target TARGET] [--dtype float32] [--shape 3x3,24x8,48x8] [--rounds 20]

Cycles of plain decoding, EAGLE-3.1, PR and PR with second looks in forwards of their own (the serial variant), in trees
of each shape (guesses x steps), and the matrix products of such a cycle with nothing in between, all in turns. How many
tokens are accepted follows one law for all: only time is measured, after 256 tokens, batch 1. OUT gets perf.json,
perf.md and perf.png.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from secondguess.bench.products import Alone, recorded
from secondguess.bench.script import Script, histogram
from secondguess.bench.serial import SerialSpeculator
from secondguess.bench.timed import PARTS, Runner, make_runner
from secondguess.commands.record import make_record
from secondguess.commands.workload import comma_separated
from secondguess.config import TreeConfig
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Plain, Speculator
from secondguess.engine.thread import run
from secondguess.methods import open_drafter, parse_method
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target

CONTEXT, TAU, WARM_UP, CYCLES, RESAMPLES = 256, 2.5, 4, 5, 10_000
SHAPES = "3x3,24x8,48x8"  # few guesses in few steps, as two cores want them; the paper's eight for its budgets
METHODS = ("eagle3.1", "pr", "pr, serial")


@dataclass(slots=True)
class Case:
    """A method's cycles with trees of one shape, and their products alone; per round the median, in milliseconds."""

    method: str
    tree: TreeConfig | None  # of plain decoding there is none
    runner: Runner
    alone: Alone
    cycle: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)  # its two products, which `products` has none of

    def round(self) -> None:
        done = len(self.runner.seconds)
        self.runner.run(CYCLES)
        self.cycle.append(1000 * median(self.runner.seconds[done:]))
        self.products.append(1000 * median(self.alone.seconds() for _ in range(CYCLES)))
        self.attention.append(1000 * median(self.alone.attention_seconds() for _ in range(CYCLES)))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    shapes = f"guesses x steps of the trees (default: {SHAPES})"
    parser.add_argument("--shape", type=comma_separated(shape), default=SHAPES, metavar="BxS,...", help=shapes)
    parser.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    return parser.parse_args(argv)


def shape(text: str) -> TreeConfig:
    """``24x8``: 24 guesses in 8 steps. Raises ValueError."""
    budget, steps = map(int, text.split("x"))
    return TreeConfig(budget=budget, num_steps=steps)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    cases = run(measure, args.target, args.dtype, args.shape, args.rounds)
    rows = [row(case, cases) for case in cases]
    record = make_record() | {"command": f"scripts/perf.py {shlex.join(argv)}"}
    (args.out / "perf.json").write_text(json.dumps({"record": record, "rows": rows}, indent=1) + "\n")
    (args.out / "perf.md").write_text(table(rows))
    draw(rows, args.out / "perf.png")
    print(table(rows), end="")


def measure(name: str, dtype: str, trees: Sequence[TreeConfig], rounds: int) -> list[Case]:
    target = load_target(name, dtype)
    drafters = {m: open_drafter(parse_method(m, TreeConfig()), target, None) for m in ("eagle3.1", "pr")}
    total = (WARM_UP + 1 + rounds * CYCLES) * (1 + max(tree.num_steps for tree in trees))
    columns = min(CONTEXT + total + max(tree.max_budget for tree in trees) + 1, target.spec.context_len)
    cases = [case_of(target, "ar", None, Plain(), columns)]
    for tree in trees:
        for method in METHODS:
            own = replace(tree, num_reconsider=3 if "pr" in method else 0)
            kind = SerialSpeculator if "serial" in method else EagleSpeculator
            speculator = kind(drafters[method.split(",")[0]], own, 1, columns)
            cases.append(case_of(target, method, own, speculator, columns))
    for number in range(rounds):
        for case in cases[:: 1 if number % 2 == 0 else -1]:
            case.round()
    return cases


def case_of(target: HFTarget, method: str, tree: TreeConfig | None, speculator: Speculator, columns: int) -> Case:
    shares = histogram(TAU, tree.num_steps) if tree else [1.0]
    script = Script(shares, no_draft_token=target.spec.vocab_size - 1)
    runner = make_runner(target, speculator, script, 1, CONTEXT, columns)
    runner.warm_up(WARM_UP)
    with recorded() as products:
        runner.run(1)
    alone = Alone(products)
    alone.seconds()
    runner.warm_up(0)
    return Case(method, tree, runner, alone)


def row(case: Case, cases: list[Case]) -> dict[str, Any]:
    budget, steps = shape_of(case)
    eagle = next((c for c in cases if shape_of(c) == (budget, steps) and c.method == "eagle3.1"), None)
    return {
        "method": case.method,
        "budget": budget,
        "steps": steps,
        "cycle_ms": median(case.cycle),
        "products_ms": median(case.products),
        "num_products": len(case.alone.calls),
        "attention_ms": median(case.attention),
        "beside_products": share(case.cycle, case.products),
        "beside_all": share(case.cycle, [p + a for p, a in zip(case.products, case.attention, strict=True)]),
        "over_eagle": ratio(case.cycle, eagle.cycle) if eagle else None,
        **{f"{part}_ms": case.runner.result()[f"{part}_ms"] for part in PARTS},
        "rounds_ms": {"cycle": case.cycle, "products": case.products, "attention": case.attention},
    }


def shape_of(case: Case) -> tuple[int, int]:
    return (case.tree.max_budget, case.tree.num_steps) if case.tree else (0, 0)


def share(cycle: list[float], products: list[float]) -> list[float]:
    """Of the cycle, what is no product: median over rounds, and its 95 % interval (bootstrap over rounds)."""
    return interval(1 - np.array(products) / np.array(cycle))


def ratio(cycle: list[float], other: list[float]) -> list[float]:
    """Paired by round."""
    return interval(np.array(cycle) / np.array(other))


def interval(values: np.ndarray) -> list[float]:
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return [float(np.median(values)), float(low), float(high)]


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| method | budget, steps | cycle, ms | its products alone, ms | rest of the cycle "
        "| attention's two products alone, ms | rest without them | over eagle3.1 |"
    )
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|"]
    for r in rows:
        rest, less = ("{:.1%} [{:.1%}, {:.1%}]".format(*r[key]) for key in ("beside_products", "beside_all"))
        over = "{:.3f}x [{:.3f}, {:.3f}]".format(*r["over_eagle"]) if r["over_eagle"] else ""
        shape = f"{r['budget']}, {r['steps']}" if r["budget"] else ""
        times = f"{r['cycle_ms']:.2f} | {r['products_ms']:.2f} | {rest} | {r['attention_ms']:.2f} | {less}"
        lines.append(f"| {r['method']} | {shape} | {times} | {over} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each cycle: products with weights, attention's, and what else it does."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [f"{r['method']}{', {budget} x {steps}'.format(**r) if r['budget'] else ''}" for r in rows][::-1]
    cycle, products, attention = (
        np.array([r[f"{part}_ms"] for r in rows][::-1]) for part in ("cycle", "products", "attention")
    )
    parts = (
        ("products with weights, alone", products, "#3b6ea8"),
        ("attention's products, alone", attention, "#7fb2a5"),
        ("rest of the cycle", np.maximum(cycle - products - attention, 0), "#d9843b"),
    )
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(rows) + 1.2), layout="constrained")
    left = np.zeros(len(rows))
    for label, widths, color in parts:
        axes.barh(names, widths, left=left, color=color, label=label)
        left += widths
    for y, r in enumerate(rows[::-1]):
        axes.text(left[y], y, f"  {r['beside_all'][0]:.0%}", va="center")
    axes.set_xlabel("milliseconds a cycle")
    axes.margins(x=0.08)
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1:])
