"""Cycles that are timed in the middle of a text that nobody has read: no time depends on what K/V hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from secondguess.bench.script import Script
from secondguess.drafter.speculator import EagleSpeculator, Slot
from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.sampler_state import start
from secondguess.engine.sequence import Sequence, TextStream, Timing
from secondguess.engine.speculate import Speculator
from secondguess.target.hf import HFTarget
from secondguess.types import Request, SamplingParams

PARTS = ("draft", "verify", "walk", "rest")


@dataclass(slots=True)
class Runner:
    """Requests under way, and what their cycles took."""

    engine: Engine
    batch: Batch
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def warm_up(self, num_cycles: int) -> None:
        self.run(num_cycles)
        self.seconds.clear()
        self.num_tokens.clear()
        for sequence in self.batch.sequences:
            sequence.timing = Timing()

    def run(self, num_cycles: int) -> None:
        for _ in range(num_cycles):
            before, started = self.engine.totals.num_tokens, perf_counter()
            run_cycle(self.engine, self.batch)
            self.seconds.append(perf_counter() - started)
            self.num_tokens.append(self.engine.totals.num_tokens - before)

    def result(self) -> dict[str, Any]:
        timing, cycles = self.batch.sequences[0].timing, len(self.seconds)
        return {
            "cycle_ms": 1000 * median(self.seconds),
            "tau": sum(self.num_tokens) / cycles / len(self.batch.sequences),
            "tokens_per_second": sum(self.num_tokens) / sum(self.seconds),
            **{f"{part}_ms": 1000 * getattr(timing, part) / cycles for part in PARTS},
        }


def make_runner(
    target: HFTarget, speculator: Speculator, script: Script, num_requests: int, context: int, num_columns: int
) -> Runner:
    """``context`` tokens of each request are read as it seems; ``speculator`` has room for ``num_columns``, too."""
    spec, n = target.spec, num_requests
    engine = Engine(target, speculator, target.new_cache(n, num_columns), script=script)
    ids = (torch.arange(context + 1) * 7919 % spec.vocab_size).tolist()
    request = Request(tuple(ids), SamplingParams(ignore_eos=True, max_tokens=num_columns))
    if isinstance(speculator, EagleSpeculator):
        taps_1LH = torch.zeros(1, len(spec.tap_layers), spec.hidden_size, dtype=spec.dtype, device=spec.device)
        newest_1 = torch.tensor(ids[-1:], device=spec.device)
        speculator.slots = {slot: Slot(context - 1, [newest_1], [taps_1LH]) for slot in range(n)}
    room = 2 * num_columns
    running = [Sequence(request, 0, slot, frozenset(), room, TextStream(None), list(ids)) for slot in range(n)]
    sampler = start([request] * n, [0] * n, vocab_size=spec.vocab_size, device=spec.device)
    return Runner(engine, Batch(running, sampler))
