#!/usr/bin/env python3
"""What a cycle costs beside its matrix products, and a PR cycle beside an EAGLE-3.1 cycle. Nothing else may run.

    scripts/perf.py OUT [--target TARGET] [--dtype float32] [--budget 3,24,48] [--rounds 20]

Cycles of plain decoding, EAGLE-3.1, PR and PR with second looks in forwards of their own (the serial variant), at each
budget, and the matrix products of such a cycle with nothing in between, all in turns. How many tokens are accepted
follows one law for all: only time is measured, after 256 tokens, batch 1. OUT gets perf.json, perf.md and perf.png.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Plain
from secondguess.engine.thread import run
from secondguess.methods import open_drafter, parse_method
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target

CONTEXT, TAU, WARM_UP, CYCLES, RESAMPLES = 256, 2.5, 4, 5, 10_000
STEPS = {3: 3}  # few guesses in few steps, as two cores want them; the paper's eight else
METHODS = ("eagle3.1", "pr", "pr, serial")


@dataclass(slots=True)
class Case:
    """A method at a budget, its cycles, and their products alone; per round the median, in milliseconds."""

    method: str
    budget: int
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
    parser.add_argument("--budget", type=comma_separated(int), default=(3, 24, 48), help="(default: 3,24,48)")
    parser.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    cases = run(measure, args.target, args.dtype, args.budget, args.rounds)
    rows = [row(case, cases) for case in cases]
    record = make_record() | {"command": f"scripts/perf.py {shlex.join(argv)}"}
    (args.out / "perf.json").write_text(json.dumps({"record": record, "rows": rows}, indent=1) + "\n")
    (args.out / "perf.md").write_text(table(rows))
    draw(rows, args.out / "perf.png")
    print(table(rows), end="")


def measure(name: str, dtype: str, budgets: Sequence[int], rounds: int) -> list[Case]:
    target = load_target(name, dtype)
    drafters = {m: open_drafter(parse_method(m, TreeConfig()), target, None) for m in ("eagle3.1", "pr")}
    total = (WARM_UP + 1 + rounds * CYCLES) * (1 + max(STEPS.get(b, 8) for b in budgets))
    columns = min(CONTEXT + total + max(budgets) + 1, target.spec.context_len)
    cases = [case_of(target, "ar", 1, lambda _: Plain(), columns)]
    for budget in budgets:
        for method in METHODS:
            cases.append(case_of(target, method, budget, maker(drafters, method, columns), columns))
    for number in range(rounds):
        for case in cases[:: 1 if number % 2 == 0 else -1]:
            case.round()
    return cases


def tree_of(method: str, budget: int) -> TreeConfig:
    return TreeConfig(budget=budget, num_steps=STEPS.get(budget, 8), num_reconsider=3 if "pr" in method else 0)


def maker(drafters: dict[str, Drafter], method: str, columns: int) -> Callable[[TreeConfig], Any]:
    kind, drafter = SerialSpeculator if "serial" in method else EagleSpeculator, drafters[method.split(",")[0]]
    return lambda tree: kind(drafter, tree, 1, columns)


def case_of(target: HFTarget, method: str, budget: int, make: Callable[[TreeConfig], Any], columns: int) -> Case:
    tree = tree_of(method, budget)
    shares = [1.0] if method == "ar" else histogram(TAU, tree.num_steps)
    script = Script(shares, no_draft_token=target.spec.vocab_size - 1)
    runner = make_runner(target, make(tree), script, 1, CONTEXT, columns)
    runner.warm_up(WARM_UP)
    with recorded() as products:
        runner.run(1)
    alone = Alone(products)
    alone.seconds()
    runner.warm_up(0)
    return Case(method, budget, runner, alone)


def row(case: Case, cases: list[Case]) -> dict[str, Any]:
    eagle = next((c for c in cases if c.budget == case.budget and c.method == "eagle3.1"), None)
    return {
        "method": case.method,
        "budget": 0 if case.method == "ar" else case.budget,
        "steps": 0 if case.method == "ar" else STEPS.get(case.budget, 8),
        "cycle_ms": median(case.cycle),
        "products_ms": median(case.products),
        "num_products": len(case.alone.calls),
        "attention_ms": median(case.attention),
        "beside_products": share(case.cycle, case.products),
        "beside_all": share(case.cycle, [p + a for p, a in zip(case.products, case.attention, strict=True)]),
        "over_eagle": ratio(case.cycle, eagle.cycle) if eagle and case.method != "ar" else None,
        **{f"{part}_ms": case.runner.result()[f"{part}_ms"] for part in PARTS},
        "rounds_ms": {"cycle": case.cycle, "products": case.products, "attention": case.attention},
    }


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
    """A bar for each cycle: products, and what else it does."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [f"{r['method']}{', B = ' + str(r['budget']) if r['budget'] else ''}" for r in rows][::-1]
    products = np.array([r["products_ms"] for r in rows][::-1])
    rest = np.array([r["cycle_ms"] for r in rows][::-1]) - products
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(rows) + 1.2), layout="constrained")
    axes.barh(names, products, color="#3b6ea8", label="matrix products alone")
    axes.barh(names, rest, left=products, color="#d9843b", label="rest of the cycle")
    for y, r in enumerate(rows[::-1]):
        axes.text(r["cycle_ms"], y, f"  {r['beside_products'][0]:.0%}", va="center")
    axes.set_xlabel("milliseconds a cycle")
    axes.margins(x=0.08)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1:])
