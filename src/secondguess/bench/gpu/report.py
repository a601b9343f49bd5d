"""What was found, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secondguess.bench.gpu.cycles import SERIAL, TAU, Case
from secondguess.bench.gpu.equality import Finding

Results = Mapping[Case, Mapping[str, Any]]


def equality_lines(findings: Sequence[Finding]) -> list[str]:
    lines = ["| check | texts | equal | excused |", "|---|---|---|---|"]
    for f in findings:
        verdict = "" if f.passed else " **FAILED**"
        lines.append(f"| {f.what}{verdict} | {f.num_texts} | {f.num_equal} | {f.excused} |")
    return lines


def cost_lines(results: Results) -> list[str]:
    """As the paper's Table 9: cycles of one request."""
    lines = [
        "| budget | method | cycle ms | over EAGLE-3.1's | draft | verify | walk | rest | tau | of the roofline |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, r in results.items():
        if case.num_requests != 1:
            continue
        base = results.get(Case("eagle3.1", case.budget, 1))
        ratio = f"{r['cycle_ms'] / base['cycle_ms']:.3f}" if base else ""
        parts = " | ".join(f"{r[f'{part}_ms']:.2f}" for part in ("draft", "verify", "walk", "rest"))
        share = f"{r['roofline']:.0%}"
        head = f"| {case.budget or '-'} | {case.method} | {r['cycle_ms']:.2f} | {ratio}"
        lines.append(f"{head} | {parts} | {r['tau']:.2f} | {share} |")
    return lines


def speedup_lines(results: Results) -> list[str]:
    """As the paper's Table 2: tokens per second over plain decoding's, by requests decoded together."""
    sizes = sorted({case.num_requests for case in results if case.method == "ar"})
    lines = ["| method | " + " | ".join(f"n = {n}" for n in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    kinds = dict.fromkeys((case.method, case.budget) for case in results if case.method not in ("ar", SERIAL))
    for method, budget in kinds:
        cells = []
        for n in sizes:
            found, plain = results.get(Case(method, budget, n)), results[Case("ar", 0, n)]
            cells.append(f"{found['tokens_per_second'] / plain['tokens_per_second']:.2f}" if found else "")
        lines.append(f"| {method}, B = {budget} | " + " | ".join(cells) + " |")
    return lines


def script_lines() -> list[str]:
    """The stated law of acceptance."""
    lines = ["| budget | method | tau | shares of cycles that accept 0, 1, ... draft tokens |", "|---|---|---|---|"]
    for budget, by_method in TAU.items():
        for method, tau in by_method.items():
            shares = " ".join(f"{share:.3f}" for share in Case(method, budget, 1).shares)
            lines.append(f"| {budget} | {method} | {tau} | {shares} |")
    return lines
