"""``python -m secondguess.bench.gpu --out DIR``: the checks, then the costs, in the time that there is."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from secondguess.atomic import writing
from secondguess.bench.gpu.cycles import SERIAL, TAU, Case, measure
from secondguess.bench.gpu.equality import check_all
from secondguess.bench.gpu.models import SHAPES, TINY, ModelShape, random_drafter, random_target
from secondguess.bench.gpu.report import cost_lines, equality_lines, script_lines, speedup_lines
from secondguess.bench.gpu.roofline import cache_bytes, copy_bandwidth, draft_bytes, target_bytes
from secondguess.commands.record import make_record
from secondguess.device import DEVICES, choose_device
from secondguess.engine.thread import run

BATCHES = (1, 2, 4, 8, 16)
METHODS = ("eagle3.1", "pr")
CONTEXT = 512


def main() -> int:
    args = parse()
    device = choose_device(args.device)
    real = device.type == "cuda"
    report = Report(args.out, args.seconds)
    report.say(f"# {torch.cuda.get_device_name(device) if real else 'No GPU: tiny shapes on the CPU'}")
    if not real:
        report.say("What follows shows that the script runs. Its times say nothing of a GPU.")
    findings = check_all(device)
    report.add("equality", [asdict(f) for f in findings], ["## Equality", *equality_lines(findings)])
    bandwidth = copy_bandwidth(device, 2**31 if real else 2**26)
    report.add("copy_bandwidth", bandwidth, [f"A copy moves {bandwidth / 1e9:.0f} GB/s, read and written."])
    report.say("## Acceptance, as it is played", *script_lines())
    for name, shape in (SHAPES if real else TINY).items():
        if report.seconds_left < args.seconds / 4:
            report.say(f"{name}: left out, the time is up")
            continue
        rows, lines = run(costs, shape, device, bandwidth)
        report.add(name, rows, [f"## {name}, random weights", *lines])
    return 0 if all(f.passed for f in findings) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m secondguess.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json and report.md")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--seconds", type=float, default=420.0, help="after three quarters nothing new is begun")
    return parser.parse_args()


class Report:
    """Says everything as soon as it is known, and keeps it: a run that is killed loses nothing."""

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.end, self.lines = folder, perf_counter() + seconds, list[str]()
        self.results: dict[str, Any] = {"record": make_record(sys.argv)}

    @property
    def seconds_left(self) -> float:
        return self.end - perf_counter()

    def add(self, name: str, result: Any, lines: list[str]) -> None:
        self.results[name] = result
        with writing(self.folder / "result.json") as temporary:
            temporary.write_text(json.dumps(self.results, indent=1) + "\n")
        self.say(*lines)

    def say(self, *lines: str) -> None:
        self.lines += [*lines, ""]
        sys.stdout.write("\n".join([*lines, "", ""]))
        sys.stdout.flush()
        with writing(self.folder / "report.md") as temporary:
            temporary.write_text("\n".join(self.lines))


def cases(with_batches: bool) -> Iterator[Case]:
    """Table 9's, then Table 2's."""
    for n in BATCHES if with_batches else (1,):
        yield Case("ar", 0, n)
        for budget in TAU if n == 1 else (max(TAU),):
            for method in (*METHODS, SERIAL) if n == 1 else METHODS:
                yield Case(method, budget, n)


def costs(shape: ModelShape, device: torch.device, bandwidth: float) -> tuple[list[dict[str, Any]], list[str]]:
    real = device.type == "cuda"
    dtype = torch.bfloat16 if real else torch.float32
    target = random_target(shape, dtype, device)
    found = measure(target, random_drafter(shape, target), list(cases(real)), 24 if real else 3, CONTEXT)
    results = {
        case: row | {"roofline": least_seconds(shape, case, dtype.itemsize, bandwidth) / (row["cycle_ms"] / 1000)}
        for case, row in found.items()
    }
    del target
    gc.collect()  # the next one needs its room
    rows = [asdict(case) | dict(row) for case, row in results.items()]
    lines = ["### Cycles of one request (Table 9)", *cost_lines(results)]
    return rows, [*lines, "", "### Speedup over plain decoding (Table 2)", *speedup_lines(results)]


def least_seconds(shape: ModelShape, case: Case, width: int, bandwidth: float) -> float:
    """What a cycle's weights and K/V take at the bandwidth of a copy."""
    moved = target_bytes(shape, width) + cache_bytes(shape, width, case.num_requests * CONTEXT)
    if case.method != "ar":
        moved += draft_bytes(shape, width, case.tree)
    return moved / bandwidth


if __name__ == "__main__":
    sys.exit(main())
