"""Times real cycles of a target and a drafter, to find out what their parts cost on this machine.

The requests stand in the middle of a text that nobody has read: no time depends on what the K/V cache holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from secondguess.config import Reconsider, TreeConfig
from secondguess.drafter.adaptive import AdaptiveSpeculator
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import Slot
from secondguess.engine.costs import CostModel, Curve
from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.sampler_state import start
from secondguess.engine.sequence import Sequence, TextStream, Timing
from secondguess.engine.speculate import Draw
from secondguess.engine.worth import host
from secondguess.target.base import Target
from secondguess.tree.candidates import Candidates
from secondguess.tree.guide import Plan
from secondguess.types import DraftTree, Request, SamplingParams, Verdict

LIMIT_S = 4.5  # for as many rounds as fit, one at least
MAX_ROUNDS = 8  # the first only warms up
MAX_BATCH = 16
TREES = (1, 4, 8, 16, 32, 64)  # nodes, the root included
MAX_ROWS = 64  # of one pass; beyond, it is bound by arithmetic, which grows by the row
STEPS = 3
CONTEXT = 128  # tokens before the root


@dataclass(frozen=True, slots=True)
class Shape:
    """A cycle to be timed: so many requests, nodes of each tree (the root included), and steps of the draft."""

    num_requests: int
    num_nodes: int
    num_steps: int
    config: TreeConfig

    @property
    def verified_rows(self) -> int:
        return self.num_requests * self.num_nodes

    @property
    def step_rows(self) -> int:
        return self.num_requests * self.config.rows_per_step


Round = Mapping[Shape, Timing]


class Dictated:
    """A policy, and the guide of its drafts, that does as the shape says."""

    shape: Shape
    steps_left: int

    def plan(self, draws: Seq[Draw]) -> Plan:
        self.steps_left = self.shape.num_steps
        return Plan(self.shape.config, self)

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        pass

    def goes_on(self, pool: Candidates) -> bool:
        host(pool.scores_RC)  # a policy looks at them, too, and waits for the device
        self.steps_left -= 1
        return self.steps_left >= 0

    def budgets(self, pool: Candidates) -> list[int]:
        return [self.shape.num_nodes - 1] * len(pool.keys_RC)


def batches(max_batch: int) -> list[int]:
    """The batch sizes that are timed for an engine of ``max_batch`` slots."""
    return sorted({1, min(max_batch, MAX_BATCH)})


def shapes(config: TreeConfig, batch: int) -> list[Shape]:
    """Trees of all sizes after drafts without steps, and lone roots after steps with and without second looks."""
    trees = [Shape(batch, n, 0, config) for n in TREES if batch * n <= MAX_ROWS]
    without_looks = replace(config, num_reconsider=0, reconsider=Reconsider())
    num_steps = min(STEPS, config.num_steps - 1)
    return trees + [Shape(batch, 1, num_steps, c) for c in dict.fromkeys((without_looks, config)) if num_steps]


def measure(target: Target, drafter: Drafter, config: TreeConfig, max_batch: int) -> CostModel:
    """What cycles of up to ``max_batch`` requests cost, by shapes timed in turns.

    It takes less than 5 s, unless one round of them takes longer.
    """
    sizes, columns, dictated = batches(max_batch), CONTEXT + 1 + max(TREES), Dictated()
    speculator = AdaptiveSpeculator(drafter, config, sizes[-1], columns, dictated)
    engine = Engine(target, speculator, target.new_cache(sizes[-1], columns))
    rounds: list[Round] = []
    started, took = perf_counter(), 0.0
    while not rounds or (len(rounds) < MAX_ROUNDS and took * (1 + 1 / len(rounds)) < LIMIT_S):
        timings = {}
        for shape in (shape for batch in sizes for shape in shapes(config, batch)):
            dictated.shape = shape
            timings[shape] = time_cycle(engine, speculator, shape.num_requests)
        rounds.append(timings)
        took = perf_counter() - started
    return summed_up(rounds[1:] or rounds)


def time_cycle(engine: Engine, speculator: AdaptiveSpeculator, num_requests: int) -> Timing:
    spec = engine.target.spec
    ids_T = torch.arange(CONTEXT + 1) * 7919 % spec.vocab_size  # any text will do
    request = Request(tuple(ids_T.tolist()), SamplingParams(ignore_eos=True))
    taps_1LH = torch.zeros(1, len(spec.tap_layers), spec.hidden_size, dtype=spec.dtype, device=spec.device)
    sequences = []
    for slot in range(num_requests):
        speculator.slots[slot] = Slot(CONTEXT - 1, ids_T[-1:].to(spec.device), taps_1LH)
        room = 2 * len(ids_T)
        sequences.append(Sequence(request, 0, slot, frozenset(), room, TextStream(None), ids_T.tolist()))
    sampler = start([request] * num_requests, [0] * num_requests, vocab_size=spec.vocab_size, device=spec.device)
    run_cycle(engine, Batch(sequences, sampler))
    return sequences[0].timing


def summed_up(rounds: Seq[Round]) -> CostModel:
    """The curves through what the rounds took. A draft's steps take what it takes longer than one without."""
    begun = {s.num_requests: s for s in rounds[0] if (s.num_nodes, s.num_steps) == (1, 0)}
    verify: dict[int, dict[int, list[float]]] = {batch: {} for batch in begun}
    steps: dict[int, list[float]] = {}
    for shape in rounds[0]:
        times = [(round_[shape], round_[begun[shape.num_requests]]) for round_ in rounds]
        if shape.num_steps:
            steps[shape.step_rows] = [(whole.draft - first.draft) / shape.num_steps for whole, first in times]
        else:
            verify[shape.num_requests][shape.verified_rows] = [t.verify + t.walk + t.rest for t, _ in times]
    return CostModel(
        batches=tuple(verify),
        verify_curves=tuple(map(Curve.of, verify.values())),
        start_curve=Curve.of({batch: [round_[shape].draft for round_ in rounds] for batch, shape in begun.items()}),
        step_curve=Curve.of(steps or {1: [0.0]}),  # a draft of one forward has no steps
    )
