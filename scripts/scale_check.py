"""The simulation that docs/scale.md plans with, against the engine: eight prompts at once, plainly and drafted for.

Every round of every case is kept beside OUT.json: when the time is up, or after a kill, the same command goes on.
Rounds go through all cases in turn, and the shortest counts: whatever disturbs only adds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from kept import Kept, TimeIsUp

from secondguess import LLM, SamplingParams
from secondguess.bench.simulate import Drafting, Job, Replica, simulate
from secondguess.commands.record import make_record, write_json
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import weights_digest
from secondguess.drafter.cost_file import find_costs
from secondguess.drafter.shipped import find_drafter
from secondguess.engine.costs import CostModel, Curve
from secondguess.engine.thread import run
from secondguess.machine import describe
from secondguess.methods import open_drafter, parse_method
from secondguess.target.hf import HFTarget
from secondguess.types import Output

TREE = TreeConfig(budget=3, num_steps=3)
METHODS, SLOTS, ROUNDS, SEEDS = ("ar", "eagle3.1", "pr"), (1, 4), 3, 20
MAX_TOKENS, MAX_MODEL_LEN = 48, 256
CLOSE = 0.2  # how far the simulation may be from the engine


@dataclass(frozen=True, slots=True)
class Case:
    method: str
    slots: int

    @property
    def drafting(self) -> Drafting:
        """How requests are drafted for; what is accepted is measured."""
        tree = parse_method(self.method, TREE).tree
        return Drafting() if self.method == "ar" else Drafting(tree.max_budget, tree.num_steps, tree.rows_per_step)


CASES = [Case(method, slots) for slots in SLOTS for method in METHODS]


def prompts() -> list[list[dict[str, str]]]:
    known = json.loads(Path(__file__).with_name("regimes.json").read_text(encoding="utf-8"))["questions"]
    return [[{"role": "user", "content": text}] for name in ("English", "Python") for text in known[name]]


def measure(target: HFTarget, case: Case) -> dict[str, Any]:
    """One round: the seconds of all requests together, and what ``counted`` says of each."""
    room = {"max_batch_size": case.slots, "max_model_len": MAX_MODEL_LEN}
    llm = LLM(target, method=case.method, tree=TREE, enable_prefix_caching=False, **room)  # as is simulated
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    llm.generate(prompts()[:1], params)  # warm
    started = perf_counter()
    outputs = llm.generate(prompts(), params)
    return {"seconds": perf_counter() - started, "requests": [counted(output) for output in outputs]}


def counted(output: Output) -> dict[str, Any]:
    """Tokens of prompt and answer, seconds of the prefill, and by draft tokens accepted the number of cycles."""
    accepted = Counter[int]()
    for (_, count), often in output.drafting.cycles.items():
        accepted[count] += often
    return {
        "prompt": len(output.prompt_ids),
        "answer": len(output.token_ids),
        "prefill_s": output.stats.prefill_s,
        "accepted": sorted(accepted.items()),
    }


def compare(case: Case, costs: CostModel, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds that the engine took in its best round, and those that the simulation says, mean over draws."""
    best = min(rounds, key=lambda r: r["seconds"])
    requests, accepted = best["requests"], Counter[int]()
    for request in requests:
        accepted.update(dict(request["accepted"]))
    drafting = replace(case.drafting, accepted={n: often / accepted.total() for n, often in accepted.items()})
    times: dict[int, list[float]] = {}
    for request in (request for r in rounds for request in r["requests"]):
        times.setdefault(request["prompt"], []).append(request["prefill_s"])
    replica = Replica(costs, Curve.of(times), case.slots)
    jobs = [Job(0.0, request["prompt"], request["answer"]) for request in requests]
    simulated = mean(max(simulate(replica, drafting, jobs, seed)) for seed in range(SEEDS))
    took = best["seconds"]
    found = {"tau": drafting.tau, "engine_s": took, "simulated_s": simulated, "ratio": simulated / took}
    return asdict(case) | found | {"close": abs(simulated / took - 1) <= CLOSE}


def made_of(target: HFTarget, case: Case, number: int) -> dict[str, Any]:
    """All that a round depends on, but for the code: it is kept under this."""
    drafts = case.method != "ar"
    return asdict(case) | {
        "target": target.fingerprint,
        "drafter": weights_digest(find_drafter(None, case.method, target.embedding)) if drafts else None,
        "machine": describe(),
        "tree": asdict(TREE),
        "max_tokens": MAX_TOKENS,
        "prompts": prompts(),
        "round": number,
    }


def check(target: HFTarget, kept: Kept) -> Iterator[dict[str, Any]]:
    """A row for each case. Raises TimeIsUp."""
    method = parse_method("pr", TREE)
    costs = run(lambda: find_costs(target, open_drafter(method, target, None), method.tree, max(SLOTS)))
    rounds: dict[Case, list[dict[str, Any]]] = {case: [] for case in CASES}
    for i in range(ROUNDS):
        for case in CASES:
            rounds[case].append(kept(made_of(target, case, i), partial(measure, target, case)))
    for case in CASES:
        yield compare(case, costs, rounds[case])


def main(args: argparse.Namespace) -> int:
    """0: the simulation is close everywhere. 1: it is not, or the time is up. ``args``: of ``scale.py``."""
    target = LLM(args.target, method="ar", max_batch_size=1, max_model_len=MAX_MODEL_LEN).target
    record = make_record() | {"command": shlex.join(sys.argv)}
    kept = Kept(args.out.with_suffix(".jsonl"), args.minutes, record["revision"])
    try:
        rows = list(check(target, kept))
    except TimeIsUp as stop:
        sys.stdout.write(f"{stop}\n")
        return 1
    sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
    write_json(args.out, record, "rows", rows, revisions=sorted(kept.revisions))
    return 0 if all(row["close"] for row in rows) else 1
