#!/usr/bin/env python3
"""The numbers of docs/scale.md.

scripts/scale.py plan                            a 70B target on eight GPUs, and 1,000 requests a second, on paper
scripts/scale.py check OUT.json [--minutes 20]   the same arithmetic against the engine, on this machine
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from pathlib import Path

from secondguess.bench.simulate import Drafting, Replica, arrivals, simulate
from secondguess.engine.costs import CostModel, Curve

# What is assumed -----------------------------------------------------------------------------------------------------

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGETS = (2, 4, 8, 16, 24, 32, 48, 64)
CONTEXT = 1500  # tokens of a request in the K/V cache
PROMPT, ANSWER = 1000, 250  # tokens of a request
REQUESTS = 1000  # a second
TAU_24 = 4.74  # EAGLE-3.1 at B = 24: the paper's Table 1, Llama-3.1-8B, mean of seven benchmarks
GAIN = 0.06  # of PR over it: the paper's headline is 5.3 to 10.2 %
STEPS, WIDTH, LOOKS = 8, 6, 3


@dataclass(frozen=True, slots=True)
class Gpus:
    """H100 SXM: data-sheet numbers, times what large products and reads attain of them."""

    count: int = 8
    bytes_per_s: float = 3.35e12 * 0.75
    flops: float = 989e12 * 0.6
    link_bytes_per_s: float = 450e9 * 0.7
    message_s: float = 15e-6  # of one all-reduce, however small
    launch_s: float = 0.5e-3  # of a pass: CUDA graphs, sampling, host


@dataclass(frozen=True, slots=True)
class Model:
    """Llama-3-70B's shape in bfloat16, split over all GPUs."""

    weights: float = 70.6e9
    num_layers: int = 80
    hidden: int = 8192
    kv_bytes_per_token: float = 2 * 80 * 8 * 128 * 2

    def seconds(self, gpus: Gpus, rows: float, requests: float, context: float = CONTEXT) -> float:
        """Of a pass: reading or computing, whichever is longer; then what cannot overlap."""
        read = (2 * self.weights + requests * context * self.kv_bytes_per_token) / gpus.count / gpus.bytes_per_s
        products = 2 * self.weights * rows + 4 * rows * context * self.num_layers * self.hidden
        sent = 2 * rows * self.hidden * 2 / gpus.link_bytes_per_s + gpus.message_s
        return max(read, products / gpus.count / gpus.flops) + 2 * self.num_layers * sent + gpus.launch_s


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """EAGLE-3.1's layer at the target's width, and a head of 32,000 tokens; whole on one GPU, or split as that is."""

    weights: float = 14 * 8192**2 + 32_000 * 8192
    parts: int = 1

    def seconds(self, gpus: Gpus, rows: float) -> float:
        read = 2 * self.weights / self.parts / gpus.bytes_per_s
        products = 2 * self.weights * rows / self.parts / gpus.flops
        return max(read, products) + (self.parts > 1) * 3 * gpus.message_s + 50e-6


def tau(passed: float, depth: int) -> float:
    """Tokens of a cycle if each depth of a tree is passed with one probability."""
    return sum(passed**d for d in range(depth + 1))


def solve(wanted: float, depth: int) -> float:
    """The probability with this tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau(middle, depth) < wanted else (low, middle)
    return low


def passed(budget: int) -> float:
    """EAGLE-3.1's probability at a budget: a depth fails less often in a larger tree, by as much as it did in our first
    bench of the default target, with tau 2.12, 2.30, 2.41 and 2.54 at 8, 16, 24 and 48 nodes (docs/lab.md).
    """
    return 1 - (1 - solve(TAU_24, STEPS)) * (1 + 0.125 * log(24 / budget))


def shares(passed: float, depth: int) -> dict[int, float]:
    """Accepted draft tokens of a cycle."""
    return {d: passed**d * (1 - passed if d < depth else 1) for d in range(depth + 1)}


# The plan ------------------------------------------------------------------------------------------------------------


def cost_model(gpus: Gpus, model: Model, drafter: DrafterShape) -> CostModel:
    sizes = sorted({n * (b + 1) for n in BATCHES for b in (0, *BUDGETS)})
    verify = tuple(Curve(tuple(sizes), tuple(model.seconds(gpus, rows, n) for rows in sizes)) for n in BATCHES)
    steps = (1, *range(8, 256 * (WIDTH + LOOKS) + 1, 8))
    step = Curve(tuple(steps), tuple(drafter.seconds(gpus, rows) for rows in steps))
    begin = Curve(BATCHES, tuple(drafter.seconds(gpus, n * TAU_24) for n in BATCHES))
    return CostModel(BATCHES, verify, begin, step)


def eagle(budget: int) -> Drafting:
    depth = min(STEPS, budget)
    return Drafting(budget, depth, WIDTH, shares(passed(budget), depth))


def with_looks(drafting: Drafting, gain: float = GAIN) -> Drafting:
    depth = max(drafting.accepted)
    more = shares(solve(drafting.tau * (1 + gain), depth), depth)
    return replace(drafting, rows_per_step=drafting.rows_per_step + LOOKS, accepted=more)


def speedups(costs: CostModel) -> Iterator[list[str]]:
    """By requests in a batch: the best budget, what it and PR bring, and the gain in tau from which PR pays."""
    for n in BATCHES:
        plain = Drafting().tokens_per_second(costs, n)
        budget = max(BUDGETS, key=lambda b: eagle(b).tokens_per_second(costs, n))
        first, second = eagle(budget), with_looks(eagle(budget))
        fixed = [d.tokens_per_second(costs, n) / plain for d in (eagle(48), first, second)]
        even = second.seconds(costs, n) / first.seconds(costs, n) - 1
        share = (first.seconds(costs, n) - float(costs.verify(n * (budget + 1), n))) / first.seconds(costs, n)
        yield [
            f"{n}",
            f"{plain:,.0f}",
            f"{fixed[0]:.2f}x",
            f"{budget}",
            f"{fixed[1]:.2f}x",
            f"{fixed[2]:.2f}x",
            f"{even:.1%}",
            f"{share:.0%}",
        ]


def capacity(costs: CostModel, drafting: Drafting, prefill: float, slots: int) -> tuple[float, float]:
    """Requests a second of one replica whose slots are always full, and seconds that each of them waits for a token."""
    each = prefill + ANSWER / drafting.tokens_per_second(costs, slots)
    return 1 / each, slots * each / ANSWER


def replicas(gpus: Gpus, model: Model, costs: CostModel, limit: float) -> Iterator[list[str]]:
    """Replicas for all requests if a token may take ``limit`` seconds, and how one fares at 90 % of its load."""
    prefill = model.seconds(gpus, PROMPT, 1, PROMPT / 2)
    best = {"plain": [Drafting()], "EAGLE-3.1": [eagle(b) for b in BUDGETS]}
    best["PR"] = [with_looks(d) for d in best["EAGLE-3.1"]]
    for name, ways in best.items():
        fits = [(capacity(costs, d, prefill, n), d, n) for d in ways for n in BATCHES]
        (rate, _), drafting, slots = max((f for f in fits if f[0][1] <= limit), key=lambda f: f[0][0])
        one = Replica(costs, Curve((PROMPT,), (prefill,)), slots)
        jobs = arrivals(0.9 * rate, 3000, PROMPT, ANSWER)
        ends = simulate(one, drafting, jobs)
        per_token = sorted((end - job.arrival) / job.answer for end, job in zip(ends, jobs, strict=True))
        yield [
            name,
            f"{drafting.num_nodes}",
            f"{slots}",
            f"{rate:.1f}",
            f"{ceil(REQUESTS / (0.9 * rate))}",
            f"{1e3 * per_token[len(per_token) // 2]:.0f}",
            f"{prefill * rate:.0%}",
        ]


def show(title: str, head: str, rows: Iterator[list[str]]) -> None:
    lines = [f"\n{title}\n", f"| {head} |", "|" + "---:|" * (head.count("|") + 1)]
    sys.stdout.write("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n")


def plan() -> None:
    gpus, model = Gpus(), Model()
    for parts in (1, gpus.count):
        costs = cost_model(gpus, model, DrafterShape(parts=parts))
        head = "requests | plain tokens/s | B = 48 | best B | EAGLE-3.1 | PR | PR pays from | drafting's share"
        show(f"Drafter on {parts} GPU(s)", head, speedups(costs))
    for limit in (0.02, 0.05):
        head = (
            "method | B | slots | requests/s of a replica | replicas | ms a token, median, simulated | prompts' share"
        )
        show(f"{REQUESTS:,} requests a second, {1e3 * limit:.0f} ms a token", head, replicas(gpus, model, costs, limit))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("plan")
    check = parts.add_parser("check")
    check.add_argument("out", type=Path, help="the table, as JSON; rounds are kept beside it")
    check.add_argument("--minutes", type=float, default=20, help="begin no round after so long (default: 20)")
    check.add_argument("--target", default="smollm2-135m", help="for which both drafters ship")
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if given.part == "plan":
        plan()
    else:
        from scale_check import main  # loads models

        sys.exit(main(given))
