"""Cycles of all methods, in turns, at one model's shape: what they cost, and what that comes to in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secondguess.bench.script import Script, histogram
from secondguess.bench.serial import ReplayedSerial, SerialSpeculator
from secondguess.bench.timed import Runner, make_runner
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.replayed import ReplayedSpeculator
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.graphs import usable
from secondguess.engine.speculate import Plain, Speculator
from secondguess.target.hf import HFTarget

WARM_UP = 4  # cycles: graphs are recorded when a shape comes the second time
ROUNDS = 3
MIN_COLUMNS = 1024  # so that one graph serves a whole measurement
# Acceptance lengths of the paper's Table 5 (Qwen3-8B, T = 0, average of its tasks), by budget.
TAU = {24: {"eagle3.1": 4.39, "pr": 4.83}, 48: {"eagle3.1": 4.835, "pr": 5.127}}
SERIAL = "pr, serial"


@dataclass(frozen=True, slots=True)
class Case:
    method: str  # ar, eagle3.1, pr or SERIAL
    budget: int  # 0 for ar
    num_requests: int

    @property
    def tree(self) -> TreeConfig:
        return TreeConfig(budget=max(self.budget, 1), num_reconsider=0 if self.method in ("ar", "eagle3.1") else 3)

    @property
    def shares(self) -> list[float]:
        """See ``histogram``."""
        if self.method == "ar":
            return [1.0]
        return histogram(TAU[self.budget]["pr" if self.method == SERIAL else self.method], self.tree.num_steps)


def measure(
    target: HFTarget, drafter: Drafter, cases: Sequence[Case], num_cycles: int, context: int
) -> Mapping[Case, dict[str, Any]]:
    """Every case's result over ``num_cycles`` cycles, a third of them at a time."""
    runners = {case: runner_of(target, drafter, case, num_cycles, context) for case in cases}
    for runner in runners.values():
        runner.warm_up(WARM_UP)
    for number in range(ROUNDS):
        for runner in list(runners.values())[:: 1 if number % 2 == 0 else -1]:
            runner.run(num_cycles // ROUNDS)
    return {case: runner.result() for case, runner in runners.items()}


def runner_of(target: HFTarget, drafter: Drafter, case: Case, num_cycles: int, context: int) -> Runner:
    written = (WARM_UP + num_cycles) * (case.tree.num_steps + 1)
    columns = max(MIN_COLUMNS, context + written + 1 + case.tree.max_budget)
    script = Script(case.shares, no_draft_token=target.spec.vocab_size - 1)
    return make_runner(target, make_speculator(drafter, case, columns), script, case.num_requests, context, columns)


def make_speculator(drafter: Drafter, case: Case, columns: int) -> Speculator:
    if case.method == "ar":
        return Plain()
    replayed = usable(drafter.embedding.device)
    if case.method == SERIAL:
        kind = ReplayedSerial if replayed else SerialSpeculator
    else:
        kind = ReplayedSpeculator if replayed else EagleSpeculator
    return kind(drafter, case.tree, case.num_requests, columns)
