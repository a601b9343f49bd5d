"""Serving on paper: cycles cost what a cost model says, and accept as many tokens as was measured or assumed.

Requests join between cycles, one prompt at a time, as in ``engine.scheduler``. ``tests/test_simulate.py`` has cases by
hand, ``scripts/scale.py check`` compares with the engine itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from secondguess.engine.costs import CostModel, Curve


@dataclass(frozen=True, slots=True)
class Replica:
    """What serves: a target and a drafter on one machine."""

    costs: CostModel
    prefill: Curve  # seconds against tokens of a prompt
    num_slots: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """How requests are drafted for; the default is not at all."""

    num_nodes: int = 0  # of each tree, the root not counted
    num_steps: int = 0  # forwards of the drafter in a cycle, the extend pass included
    rows_per_step: int = 0  # of one request
    accepted: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})  # draft tokens of a cycle: share of cycles

    @property
    def tau(self) -> float:
        """Tokens per cycle."""
        return 1 + sum(count * share for count, share in self.accepted.items())

    def seconds(self, costs: CostModel, num_requests: int) -> float:
        """Of a cycle."""
        verify = float(costs.verify(num_requests * (1 + self.num_nodes), num_requests))
        if not self.num_steps:
            return verify
        steps = (self.num_steps - 1) * costs.draft_step(num_requests * self.rows_per_step)
        return costs.draft_start(num_requests) + steps + verify

    def tokens_per_second(self, costs: CostModel, num_requests: int) -> float:
        """Of so many requests that never end."""
        return num_requests * self.tau / self.seconds(costs, num_requests)


@dataclass(frozen=True, slots=True)
class Job:
    """A request: when it comes (seconds), the tokens of its prompt, and those of its answer."""

    arrival: float
    prompt: int
    answer: int


def simulate(replica: Replica, drafting: Drafting, jobs: Sequence[Job], seed: int = 0) -> list[float]:
    """When each job ends. ``jobs`` in the order of their arrival."""
    rng, waiting, now = np.random.default_rng(seed), deque(enumerate(jobs)), 0.0
    counts, shares = np.array([*drafting.accepted]), np.array([*drafting.accepted.values()])
    seconds = cache(lambda num_requests: drafting.seconds(replica.costs, num_requests))
    left: dict[int, int] = {}  # tokens, of those that run
    ends = [0.0] * len(jobs)
    while waiting or left:
        if waiting and waiting[0][1].arrival <= now and len(left) < replica.num_slots:
            i, job = waiting.popleft()
            now += float(replica.prefill.at(job.prompt))
            left[i] = job.answer - 1  # prefill emits one
        elif left:
            now += seconds(len(left))
            for i, accepted in zip(left, rng.choice(counts, len(left), p=shares / shares.sum()), strict=True):
                left[i] -= 1 + int(accepted)
        else:
            now = waiting[0][1].arrival
        for i in [i for i, tokens in left.items() if tokens <= 0]:
            del left[i]
            ends[i] = now
    return ends


def arrivals(per_second: float, count: int, prompt: int, answer: int, seed: int = 0) -> list[Job]:
    """Jobs that come independently of each other (Poisson), with answers of random (geometric) length."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(1 / per_second, count).cumsum()
    lengths = rng.geometric(1 / answer, count)
    return [Job(float(time), prompt, int(length)) for time, length in zip(times, lengths, strict=True)]
