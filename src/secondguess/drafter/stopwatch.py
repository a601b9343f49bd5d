"""Times real cycles of a target and a drafter, to find out what their parts cost on this machine.

The requests stand in the middle of a text that nobody has read: no time depends on what the K/V cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import torch

from secondguess.config import Reconsider, TreeConfig
from secondguess.drafter.adaptive import AdaptiveSpeculator
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import Slot
from secondguess.engine.costs import CostModel, Curve
from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.policy import Auto
from secondguess.engine.sampler_state import start
from secondguess.engine.sequence import Sequence, TextStream, Timing
from secondguess.engine.speculate import Draw
from secondguess.target.base import Target
from secondguess.tree.candidates import Candidates
from secondguess.tree.guide import Guide, Plan
from secondguess.types import DraftTree, Request, SamplingParams, Verdict

LIMIT_S = 4.5  # for as many rounds as fit, one at least
MAX_ROUNDS = 8  # the first only warms up
MAX_BATCH = 16
TREES = (1, 4, 8, 16, 32, 64)  # nodes, the root included
MAX_ROWS = 64  # of one pass; beyond, it is bound by arithmetic, which grows by the row
STEPS = 3
CONTEXT, FAR = 128, 2048  # tokens before the root
FAR_TREES = (1, 32)  # what attention costs is a line through these


@dataclass(frozen=True, slots=True)
class Shape:
    """A cycle to be timed: so many requests, nodes of each tree (the root included), steps of the draft, and tokens."""

    num_requests: int
    num_nodes: int
    num_steps: int
    config: TreeConfig
    context: int = CONTEXT

    @property
    def verified_rows(self) -> int:
        return self.num_requests * self.num_nodes

    @property
    def step_rows(self) -> int:
        return self.num_requests * self.config.rows_per_step


Round = Mapping[Shape, Timing]
ANY_COSTS = CostModel((1,), (Curve((1,), (1.0,)),), Curve((1,), (1.0,)), Curve((1,), (1.0,)))


class Dictated:
    """A policy, and the guide of its drafts, that does as the shape says.

    The policy that will decide is asked and told everything, so that its own time counts, and no answer is heeded.
    """

    shape: Shape
    steps_left: int
    asked: Guide

    def __init__(self, config: TreeConfig) -> None:
        self.policy = Auto(config, ANY_COSTS)

    def plan(self, draws: Seq[Draw], context: float) -> Plan:
        self.steps_left = self.shape.num_steps
        self.policy.regimes.clear()  # in its first cycle it drafts
        plan = self.policy.plan(draws, context)
        assert plan
        self.asked = plan.guide
        return Plan(self.shape.config, self)

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        self.policy.learn(tree, verdict, seconds)

    def goes_on(self, pool: Candidates) -> bool:
        self.asked.goes_on(pool)
        self.steps_left -= 1
        return self.steps_left >= 0

    def budgets(self, pool: Candidates) -> list[int]:
        self.asked.budgets(pool)
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


def far_shapes(config: TreeConfig, context_len: int) -> list[Shape]:
    """Trees of one request late in a text, if the target's context is that long."""
    far = min(FAR, context_len - 1 - max(FAR_TREES))
    return [Shape(1, n, 0, config, far) for n in FAR_TREES if far > CONTEXT]


def measure(target: Target, drafter: Drafter, config: TreeConfig, max_batch: int) -> CostModel:
    """What cycles of up to ``max_batch`` requests cost, by shapes timed in turns.

    It takes less than 5 s, unless the few cycles of one request take longer: where time is short, they stand for all.
    """
    first, *larger = (shapes(config, batch) for batch in batches(max_batch))
    far, dictated = far_shapes(config, target.spec.context_len), Dictated(config)
    slots = {CONTEXT: batches(max_batch)[-1]} | {shape.context: shape.num_requests for shape in far}
    engines = {context: stand(target, drafter, config, n, context, dictated) for context, n in slots.items()}

    def time_shape(shape: Shape) -> Timing:
        dictated.shape = shape
        return time_cycle(*engines[shape.context], shape)

    started = perf_counter()
    rounds = [first_round([first, far, *larger], time_shape)]
    while len(rounds) < MAX_ROUNDS and (perf_counter() - started) * (1 + 1 / len(rounds)) < LIMIT_S:
        rounds.append({shape: time_shape(shape) for shape in rounds[0]})
    return summed_up(rounds[1:] or rounds)


def first_round(groups: Seq[Seq[Shape]], time_shape: Callable[[Shape], Timing]) -> Round:
    """Of as many groups as there is time for, if none takes longer than those before it; of the first in any case."""
    timings: dict[Shape, Timing] = {}
    borders = [perf_counter()]
    for group in groups:
        timings |= {shape: time_shape(shape) for shape in group}
        borders.append(perf_counter())
        if borders[-1] - borders[0] + max(b - a for a, b in pairwise(borders)) > LIMIT_S:
            break
    return timings


def stand(
    target: Target, drafter: Drafter, config: TreeConfig, num_slots: int, context: int, policy: Dictated
) -> tuple[Engine, AdaptiveSpeculator]:
    columns = context + 1 + max(TREES)
    speculator = AdaptiveSpeculator(drafter, config, num_slots, columns, policy)
    return Engine(target, speculator, target.new_cache(num_slots, columns)), speculator


def time_cycle(engine: Engine, speculator: AdaptiveSpeculator, shape: Shape) -> Timing:
    spec, num_requests = engine.target.spec, shape.num_requests
    ids_T = torch.arange(shape.context + 1) * 7919 % spec.vocab_size  # any text will do
    request = Request(tuple(ids_T.tolist()), SamplingParams(ignore_eos=True))
    taps_1LH = torch.zeros(1, len(spec.tap_layers), spec.hidden_size, dtype=spec.dtype, device=spec.device)
    sequences = []
    for slot in range(num_requests):
        speculator.slots[slot] = Slot(shape.context - 1, [ids_T[-1:].to(spec.device)], [taps_1LH])
        room = 2 * len(ids_T)
        sequences.append(Sequence(request, 0, slot, frozenset(), room, TextStream(None), ids_T.tolist()))
    sampler = start([request] * num_requests, [0] * num_requests, vocab_size=spec.vocab_size, device=spec.device)
    run_cycle(engine, Batch(sequences, sampler))
    return sequences[0].timing


def summed_up(rounds: Seq[Round]) -> CostModel:
    """The curves through what the rounds took. A draft's steps take what it takes longer than one without."""
    near = [shape for shape in rounds[0] if shape.context == CONTEXT]
    begun = {s.num_requests: s for s in near if (s.num_nodes, s.num_steps) == (1, 0)}
    verify: dict[int, dict[int, list[float]]] = {batch: {} for batch in begun}
    steps: dict[int, list[float]] = {}
    for shape in near:
        times = [(round_[shape], round_[begun[shape.num_requests]]) for round_ in rounds]
        if shape.num_steps:
            steps[shape.step_rows] = [(whole.draft - first.draft) / shape.num_steps for whole, first in times]
        else:
            verify[shape.num_requests][shape.verified_rows] = [after_draft(round_[shape]) for round_ in rounds]
    return CostModel(
        batches=tuple(verify),
        verify_curves=tuple(map(Curve.of, verify.values())),
        start_curve=Curve.of({batch: [round_[shape].draft for round_ in rounds] for batch, shape in begun.items()}),
        step_curve=Curve.of(steps or {1: [0.0]}),  # a draft of one forward has no steps
        context=CONTEXT,
        context_curve=Curve.of({s.num_nodes: [further(rounds, s)] for s in rounds[0] if s not in near} or {1: [0.0]}),
    )


def after_draft(timing: Timing) -> float:
    return timing.verify + timing.walk + timing.rest


def further(rounds: Seq[Round], far: Shape) -> float:
    """What each token of context adds to a cycle."""
    late, early = (min(after_draft(round_[s]) for round_ in rounds) for s in (far, replace(far, context=CONTEXT)))
    return max(late - early, 0.0) / (far.context - CONTEXT)
