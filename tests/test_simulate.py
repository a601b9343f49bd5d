"""Serving on paper, against timelines by hand and its own long run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secondguess.bench.simulate import Drafting, Job, Replica, arrivals, simulate
from secondguess.engine.costs import CostModel, Curve


def costs(verify: float = 1.0, per_row: float = 0.0, start: float = 0.0, step: float = 0.0) -> CostModel:
    line = Curve((1.0, 2.0), (verify + per_row, verify + 2 * per_row))
    return CostModel((1,), (line,), Curve((1.0,), (start,)), Curve((1.0,), (step,)))


def replica(model: CostModel, num_slots: int = 2, prefill: float = 1.0) -> Replica:
    return Replica(model, Curve((1.0,), (prefill,)), num_slots)


def test_plain_decoding_by_hand() -> None:
    """Two prompts (1, 2), two cycles (3, 4), the third prompt (5), its two cycles (6, 7); the last comes late."""
    jobs = [Job(0, 5, 3), Job(0, 5, 3), Job(0, 5, 3), Job(100, 5, 1)]
    assert simulate(replica(costs()), Drafting(), jobs) == [4, 4, 7, 101]


def test_drafting_by_hand() -> None:
    """Cycles of 4 tokens: 5 rows of 0.1 and 1 verified, 0.5 to begin, 2 steps more of 0.25."""
    drafting = Drafting(num_nodes=4, num_steps=3, rows_per_step=6, accepted={3: 1.0})
    model = costs(1, 0.1, 0.5, 0.25)
    assert drafting.tau == 4
    assert drafting.seconds(model, 1) == pytest.approx(2.5)
    assert drafting.seconds(model, 2) == pytest.approx(3.0)  # ten rows
    assert simulate(replica(model), drafting, [Job(0, 5, 6)]) == pytest.approx([1 + 2 * 2.5])


@given(st.integers(1, 8), st.integers(0, 3))
def test_in_the_long_run_it_is_the_formula(num_slots: int, seed: int) -> None:
    drafting = Drafting(8, 4, 6, {0: 0.3, 1: 0.3, 4: 0.4})
    model = costs(1, 0.02, 0.1, 0.1)
    jobs = [Job(0, 1, 2000)] * num_slots
    end = max(simulate(replica(model, num_slots, 0.0), drafting, jobs, seed))
    assert num_slots * 2000 / end == pytest.approx(drafting.tokens_per_second(model, num_slots), rel=0.15)


def test_a_replica_that_is_hardly_used_answers_as_if_alone() -> None:
    jobs = arrivals(0.001, 200, 5, 20)
    ends = simulate(replica(costs(0.1), 4, 0.5), Drafting(), jobs)
    alone = [0.5 + 0.1 * (job.answer - 1) for job in jobs]
    late = [end - job.arrival for end, job in zip(ends, jobs, strict=True)]
    assert sorted(late)[: len(late) // 2] == pytest.approx(sorted(alone)[: len(alone) // 2], rel=0.05)
    assert sum(job.answer for job in jobs) / 200 == pytest.approx(20, rel=0.2)
