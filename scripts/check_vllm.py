#!/usr/bin/env python3
"""Does vLLM serve our drafters as we do? Not part of the tests: it takes some minutes, and vLLM's environment.

    scripts/peers.sh vllm
    .venv/bin/python scripts/check_vllm.py --out runs/vllm

Each shipped drafter is exported. Then, in one run, the doctor's prompts are decoded greedily by us (plainly, and with
chains as long as vLLM's) and by vLLM (plainly, with ``method: eagle3`` and, for PR, with our proposer). Other arguments
are those of ``secondguess bench``. Exit code 1 unless

- every text of vLLM with a drafter is that of vLLM without one;
- ``method: eagle3`` accepts as much as our own chains of the same checkpoint, to 2 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import secondguess
from secondguess.cli import main
from secondguess.config import CHAIN
from secondguess.drafter.checkpoint import weights_digest
from secondguess.drafter.shipped import find_alone

FLAGS_OF = ("bench", "smollm2-135m")  # the command that further flags are for, and what it needs
TASK = Path(secondguess.__file__).parent / "tasks" / "doctor.jsonl"
OURS = f"eagle3.1:budget={CHAIN},num_steps={CHAIN},grow_width=1,offer_width=1"
PLAIN, EAGLE = "vllm", "vllm:eagle3"
PEERS = {"eagle3.1": (PLAIN, EAGLE), "pr": (PLAIN, EAGLE, "vllm:pr")}
CLOSE = 0.02  # two computations in float32 round differently, and a near-tie in a draft may fall either way


def run(name: str, out: Path, bench: list[str]) -> list[str]:
    """One drafter: what is wrong. Other weights have another folder, so that no answer of theirs is taken for an answer
    of these.
    """
    shipped = f"smollm2-135m/{name}"
    folder = out / f"{name}-{weights_digest(find_alone(shipped))[:8]}"
    drafter, found = folder / "exported", folder / "bench"
    shutil.rmtree(drafter, ignore_errors=True)
    command("export", shipped, "--to", "eagle3", drafter)
    methods = ("--method", f"ar,{OURS}", "--peers", ",".join(PEERS[name]))
    command("bench", "smollm2-135m", "--tasks", TASK, "--drafter", drafter, *methods, "--out", found, *bench)
    rows = {row["method"]: row for row in json.loads((found / "summary.json").read_text())["rows"]}
    return check_texts(name, texts_of(found)) + check_tau(name, rows)


def command(*argv: str | Path) -> None:
    if code := main([str(word) for word in argv]):
        sys.exit(code)


def texts_of(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Token ids by method and prompt."""
    texts: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for line in map(json.loads, (folder / "requests.jsonl").read_text().splitlines()):
        texts[line["method"]][line["id"]] = line["token_ids"]
    return texts


def check_texts(name: str, texts: dict[str, dict[str, list[int]]]) -> list[str]:
    wrong = []
    for method in PEERS[name][1:]:
        others = [key for key, ids in texts[method].items() if ids != texts[PLAIN][key]]
        wrong += [f"{name}: {method} writes another text than {PLAIN}: {', '.join(others)}"] if others else []
    return wrong


def check_tau(name: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    ours, theirs = (rows[method]["acceptance_length"] for method in (OURS, EAGLE))
    same = abs(theirs / ours - 1) <= CLOSE
    return [] if same else [f"{name}: {EAGLE} accepts {theirs:.3f} tokens a cycle, our own chains {ours:.3f}"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """``flags`` are those of ``secondguess bench``."""
    parser = argparse.ArgumentParser(description="Does vLLM serve our drafters as we do?")
    parser.add_argument("--out", type=Path, default=Path("runs/vllm"), help="folder (default: runs/vllm)")
    args, flags = parser.parse_known_args(argv)
    args.flags = flags
    return args


if __name__ == "__main__":
    args = parse(sys.argv[1:])
    complaints = [line for name in PEERS for line in run(name, args.out, args.flags)]
    fine = "vLLM writes the same texts, and accepts as much as our own chains"
    sys.stdout.write("\n".join(complaints or [fine]) + "\n")
    sys.exit(1 if complaints else 0)
