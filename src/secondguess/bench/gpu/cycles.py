"""Cycles of all methods, in turns, at one model's shape: what they cost, and what that comes to in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from secondguess.bench.gpu.script import Script, histogram
from secondguess.bench.serial import SerialSpeculator
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.replayed import ReplayedSpeculator
from secondguess.drafter.speculator import EagleSpeculator, Slot
from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.graphs import usable
from secondguess.engine.sampler_state import start
from secondguess.engine.sequence import Sequence as Running
from secondguess.engine.sequence import TextStream, Timing
from secondguess.engine.speculate import Plain, Speculator
from secondguess.target.hf import HFTarget
from secondguess.types import Request, SamplingParams

WARM_UP = 4  # cycles: graphs are recorded when a shape comes the second time
ROUNDS = 3
MIN_COLUMNS = 1024  # so that one graph serves a whole measurement
# Acceptance lengths of the paper's Table 5 (Qwen3-8B, T = 0, average of its tasks), by budget.
TAU = {24: {"eagle3.1": 4.39, "pr": 4.83}, 48: {"eagle3.1": 4.835, "pr": 5.127}}
SERIAL = "pr, serial"


class ReplayedSerial(SerialSpeculator, ReplayedSpeculator):
    """Second looks in forwards of their own, the draft a CUDA graph."""


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


@dataclass(slots=True)
class Runner:
    """One case under way."""

    engine: Engine
    batch: Batch
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def run(self, num_cycles: int, counted: bool) -> None:
        for _ in range(num_cycles):
            before, started = self.engine.totals.num_tokens, perf_counter()
            run_cycle(self.engine, self.batch)
            if counted:
                self.seconds.append(perf_counter() - started)
                self.num_tokens.append(self.engine.totals.num_tokens - before)

    def result(self) -> dict[str, Any]:
        requests = len(self.batch.sequences)
        timing, cycles = self.batch.sequences[0].timing, len(self.seconds)
        parts = {name: 1000 * getattr(timing, name) / cycles for name in ("draft", "verify", "walk", "rest")}
        return {
            "cycle_ms": 1000 * median(self.seconds),
            "tau": sum(self.num_tokens) / cycles / requests,
            "tokens_per_second": sum(self.num_tokens) / sum(self.seconds),
            **{f"{name}_ms": value for name, value in parts.items()},
        }


def measure(
    target: HFTarget, drafter: Drafter, cases: Sequence[Case], num_cycles: int, context: int
) -> Mapping[Case, dict[str, Any]]:
    """Every case's result over ``num_cycles`` cycles, a third of them at a time."""
    most = WARM_UP + num_cycles
    runners = {case: make_runner(target, drafter, case, context, most) for case in cases}
    for runner in runners.values():
        runner.run(WARM_UP, counted=False)
        for sequence in runner.batch.sequences:
            sequence.timing = Timing()
    for number in range(ROUNDS):
        for runner in list(runners.values())[:: 1 if number % 2 == 0 else -1]:
            runner.run(num_cycles // ROUNDS, counted=True)
    return {case: runner.result() for case, runner in runners.items()}


def make_runner(target: HFTarget, drafter: Drafter, case: Case, context: int, num_cycles: int) -> Runner:
    """Requests that stand after ``context`` tokens that nobody has read: no time depends on what K/V hold."""
    spec, tree, n = target.spec, case.tree, case.num_requests
    columns = max(MIN_COLUMNS, context + num_cycles * (tree.num_steps + 1) + 1 + tree.max_budget)
    script = Script(case.shares, no_draft_token=spec.vocab_size - 1)
    engine = Engine(target, make_speculator(drafter, case, columns), target.new_cache(n, columns), script=script)
    ids = (torch.arange(context + 1) * 7919 % spec.vocab_size).tolist()
    request = Request(tuple(ids), SamplingParams(ignore_eos=True, max_tokens=columns))
    if isinstance(engine.speculator, EagleSpeculator):
        taps_1LH = torch.zeros(1, len(spec.tap_layers), spec.hidden_size, dtype=spec.dtype, device=spec.device)
        newest_1 = torch.tensor(ids[-1:], device=spec.device)
        engine.speculator.slots = {slot: Slot(context - 1, newest_1, taps_1LH) for slot in range(n)}
    running = [Running(request, 0, slot, frozenset(), 2 * columns, TextStream(None), list(ids)) for slot in range(n)]
    sampler = start([request] * n, [0] * n, vocab_size=spec.vocab_size, device=spec.device)
    return Runner(engine, Batch(running, sampler))


def make_speculator(drafter: Drafter, case: Case, columns: int) -> Speculator:
    if case.method == "ar":
        return Plain()
    replayed = usable(drafter.embedding.device)
    if case.method == SERIAL:
        kind = ReplayedSerial if replayed else SerialSpeculator
    else:
        kind = ReplayedSpeculator if replayed else EagleSpeculator
    return kind(drafter, case.tree, case.num_requests, columns)
