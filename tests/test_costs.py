"""Cost curves: literal points, what is measured, what is kept."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from secondguess.config import TreeConfig
from secondguess.drafter import cost_file, stopwatch
from secondguess.drafter.cost_file import MAX_AGE_S, find_costs
from secondguess.drafter.stopwatch import LIMIT_S, Dictated, Shape, far_shapes, measure, shapes, summed_up
from secondguess.engine.costs import CostModel, Curve
from secondguess.engine.sequence import Timing
from secondguess.engine.speculate import GREEDY
from secondguess.engine.worth import Worth
from secondguess.target.hf import HFTarget
from secondguess.testing import tiny_drafter, tiny_target
from test_policy import pool_of

TREE = TreeConfig(budget="auto", num_steps=5)
FLAT = Curve((1, 64), (0.25, 0.25))


def test_a_curve_joins_the_shortest_times_and_goes_on() -> None:
    curve = Curve.of({4: [3.0, 2.5, 2.0], 1: [1.0], 8: [4.0, 4.0]})
    assert curve == Curve((1, 4, 8), (1.0, 2.0, 4.0))
    assert curve.at([0, 1, 2.5, 6, 8, 12]).tolist() == [1.0, 1.0, 1.5, 3.0, 4.0, 6.0]
    assert Curve((3,), (2.0,)).at(9) == 2.0


def test_a_larger_size_that_seems_cheaper_is_noise() -> None:
    assert Curve.of({1: [2.0], 4: [1.5], 8: [3.0]}) == Curve((1, 4, 8), (2.0, 2.0, 3.0))


def test_batch_sizes_in_between_are_mixed() -> None:
    model = CostModel((1, 5), (Curve((1, 9), (1.0, 9.0)), Curve((5, 9), (10.0, 14.0))), Curve((1,), (0.5,)), FLAT)
    assert model.verify([5, 9], 1).tolist() == [5.0, 9.0]
    assert model.verify([5, 9], 3).tolist() == [7.5, 11.5]
    assert model.verify([5, 13], 8).tolist() == [10.0, 18.0], "beyond the largest batch its curve holds"
    assert CostModel.from_json(json.loads(json.dumps(asdict(model)))) == model


def test_parts_are_told_apart() -> None:
    """A draft takes 2 s, a step 3 s (4 with looks), what follows 10 s, 1 s a row and 1 s for 400 tokens more."""

    def timing(s: Shape) -> Timing:
        step, late = 4.0 if s.config.num_reconsider else 3.0, (s.context - 128) / 400 * s.verified_rows
        return Timing(draft=2.0 + step * s.num_steps, verify=9.0 + s.verified_rows + late, walk=0.75, rest=0.25)

    timed = [*far_shapes(TREE, 4096), *(s for batch in (1, 16) for s in shapes(TREE, batch))]
    model = summed_up([{s: timing(s) for s in timed}] * 3)
    assert model.verify([1, 2, 64], 1, 128).tolist() == [11.0, 12.0, 74.0]
    assert model.verify([1, 2, 64], 1, 8128).tolist() == pytest.approx([31.0, 52.0, 74.0 + 64 * 20])
    assert float(model.verify(64, 16, 528)) == pytest.approx(74.0 + 64), "each request's rows see its own tokens"
    assert model.batches == (1, 16)
    assert model.verify([1, 2, 64, 65], 1).tolist() == [11.0, 12.0, 74.0, 75.0]
    assert (model.draft_start(1), model.draft_start(16)) == (2.0, 2.0)
    assert (model.draft_step(6), model.draft_step(9)) == (3.0, 4.0)


def test_a_draft_of_one_forward_has_no_steps() -> None:
    config = replace(TREE, num_steps=1)
    model = summed_up([{s: Timing(draft=1.0, verify=1.0) for s in shapes(config, 1)}])
    assert model.draft_step(9) == 0.0


def test_the_stopwatch_times_what_it_says(monkeypatch) -> None:
    """The sizes of passes and drafts, on a tiny target."""
    target = tiny_target("llama", 0, torch.float32)
    seen, widths, forward = [], [], target.forward

    def spy(rows, cache, last_only=False):
        seen.append(tuple(rows.tokens_RN.shape))
        widths.append(rows.visible_RNW.shape[2])
        return forward(rows, cache, last_only)

    monkeypatch.setattr(target, "forward", spy)
    monkeypatch.setattr(stopwatch, "MAX_ROUNDS", 1)
    model = measure(target, tiny_drafter(target), TREE, 4)
    trees = [(1, n) for n in (1, 4, 8, 16, 32, 64, 1, 1, 1, 32)] + [(4, n) for n in (1, 4, 8, 16, 1, 1)]
    assert seen == trees
    assert model.step_curve.sizes == (6, 9, 24, 36)
    assert model.verify_curves[1].sizes == (4, 16, 32, 64)
    assert model.context_curve.sizes == (1, 32)
    assert widths == [128 + n for _, n in trees[:8]] + [1024 - 32, 1024 - 1] + [128 + n for _, n in trees[10:]]
    assert (model.verify([1, 64]) > 0).all()
    assert model.draft_start() > 0


@pytest.mark.parametrize(
    ("pass_s", "curves", "limit"),
    [(0.02, 2, LIMIT_S), (0.1, 2, LIMIT_S), (0.25, 2, LIMIT_S), (0.3, 1, LIMIT_S), (2.0, 1, 8 * 2.0)],
)
def test_a_slow_target_is_not_timed_for_longer_than_the_limit(pass_s, curves, limit, monkeypatch) -> None:
    """A clock that only its passes move; eight of them say what one request costs, and are taken in any case."""
    target, now = tiny_target("llama", 0, torch.float32), [0.0]
    forward = target.forward

    def slow(*arguments):
        now[0] += pass_s
        return forward(*arguments)

    monkeypatch.setattr(target, "forward", slow)
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: now[0])
    model = measure(target, tiny_drafter(target), TREE, 4)
    assert now[0] <= limit
    assert now[0] > LIMIT_S / 3, "time is made use of"
    assert len(model.verify_curves) == curves
    assert model.verify_curves[0].sizes == (1, 4, 8, 16, 32, 64)


def test_a_short_context_has_no_far_shapes() -> None:
    assert far_shapes(TREE, 160) == []
    assert [s.context for s in far_shapes(TREE, 512)] == [479, 479]
    assert [s.context for s in far_shapes(TREE, 8192)] == [2048, 2048]


def test_dictated_drafts_have_the_steps_and_nodes_of_the_shape() -> None:
    dictated = Dictated(TREE)
    dictated.shape = Shape(1, 8, 2, TREE)
    plan = dictated.plan([GREEDY], 100)
    pool = pool_of(0.9, 0.8)
    assert [plan.guide.goes_on(pool) for _ in range(3)] == [True, True, False]
    assert plan.guide.budgets(pool) == [7]


def test_the_policy_that_will_decide_is_asked_each_time_so_that_its_time_counts(monkeypatch) -> None:
    dictated, asked = Dictated(TREE), []
    dictated.shape = Shape(1, 1, 1, TREE)
    for name in ("goes_on", "budgets"):
        monkeypatch.setattr(Worth, name, lambda _self, _pool, name=name: asked.append(name))
    for _ in range(40):
        guide = dictated.plan([GREEDY], 100).guide
        guide.goes_on(pool_of(0.9))
        guide.budgets(pool_of(0.9))
        dictated.policy.cycle.regime.switch.learn(True, 1.0, 100.0, 1)
    assert asked == ["goes_on", "budgets"] * 40


@pytest.fixture
def found(tmp_path, monkeypatch):
    """``find_costs`` on a tiny target, with a list of the measurements that it took."""
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path))
    target = tiny_target("llama", 0, torch.float32)
    drafter, taken = tiny_drafter(target), []

    def once(*circumstances) -> CostModel:
        taken.append(circumstances)
        return CostModel((1,), (Curve((1, 64), (1.0, 1.0 + len(taken))),), FLAT, FLAT)

    monkeypatch.setattr(cost_file, "measure", once)
    return lambda tree=TREE, batch=1: find_costs(target, drafter, tree, batch), taken


def test_costs_are_kept_for_a_day(found, tmp_path) -> None:
    find, taken = found
    first = find()
    assert find() == first
    assert len(taken) == 1
    (path,) = (tmp_path / "costs").iterdir()
    old = time.time() - MAX_AGE_S - 60
    os.utime(path, (old, old))
    assert find() != first
    assert len(taken) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {"batches": [1]}}', '{"costs": null}'])
def test_damaged_costs_are_measured_anew(found, tmp_path, text: str) -> None:
    find, taken = found
    find()
    (path,) = (tmp_path / "costs").iterdir()
    path.write_text(text)
    find()
    assert len(taken) == 2


def test_other_circumstances_have_other_costs(found, monkeypatch) -> None:
    find, taken = found
    find()
    find(replace(TREE, grow_width=3))
    find(TREE, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    find()
    assert len(taken) == 4


def test_changed_code_is_measured_anew(found, monkeypatch) -> None:
    find, taken = found
    find()
    monkeypatch.setattr(cost_file, "sources_digest", lambda: "other C code")
    find()
    monkeypatch.setattr(HFTarget, "forward_id", "another forward")
    find()
    find()
    assert len(taken) == 3


def test_where_nothing_can_be_kept_every_start_measures(found, tmp_path) -> None:
    find, taken = found
    (tmp_path / "costs").write_text("a file in the way")
    assert np.isfinite(find().verify([1, 64])).all()
    find()
    assert len(taken) == 2
