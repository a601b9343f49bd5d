"""What ``budget="auto"`` learns and decides: calibration, the switch, the worth of a draft, the policy as a whole."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secondguess.config import TreeConfig
from secondguess.engine.calibration import CENTRES_B, EDGES, Calibration, probability, rising
from secondguess.engine.costs import CostModel, Curve
from secondguess.engine.policy import Auto
from secondguess.engine.regime import EXPLORE, Regime, regime_key, warmth
from secondguess.engine.speculate import GREEDY, Draw
from secondguess.engine.switch import LONGEST_PEEK, Switch
from secondguess.engine.worth import Worth
from secondguess.tree.candidates import Candidates, append, plant
from secondguess.tree.rows import Offers, Root
from secondguess.types import DraftTree, Verdict

scores = st.lists(st.floats(-15, 0), min_size=1, max_size=40).map(np.array)


# ---- calibration


@given(scores)
def test_nothing_seen_nothing_changed(scores_N: np.ndarray) -> None:
    np.testing.assert_allclose(probability(scores_N, Calibration.blank().offsets()), np.exp(scores_N), rtol=1e-12)


@st.composite
def experience(draw: st.DrawFn) -> Calibration:
    rng, calibration = np.random.default_rng(draw(st.integers(0, 2**32))), Calibration.blank()
    for _ in range(draw(st.integers(1, 20))):
        scores_N = -rng.exponential(3.0, draw(st.integers(0, 60)))
        calibration = calibration.seen(scores_N, rng.random(len(scores_N)) < rng.random())
    return calibration


@given(experience())
def test_a_higher_score_never_has_a_lower_probability(calibration: Calibration) -> None:
    probs_N = probability(np.linspace(-15, 0, 500), calibration.offsets())
    assert (np.diff(probs_N) >= -1e-12).all()
    assert (probs_N >= 0).all()
    assert (probs_N <= 1).all()


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.9])
def test_frequencies_are_learnt(rate: float) -> None:
    """Nodes of probability 0.6, as promised, are accepted at another rate; those far from them keep theirs."""
    rng, calibration, score = np.random.default_rng(0), Calibration.blank(), np.log(0.6)
    for _ in range(400):
        calibration = calibration.seen(np.full(6, score), rng.random(6) < rate)
    offsets_B = calibration.offsets()
    centre = CENTRES_B[np.digitize(score, EDGES)]
    assert probability(np.array([centre]), offsets_B)[0] == pytest.approx(rate * np.exp(centre) / 0.6, rel=0.1)
    if rate < 0.5:
        assert probability(np.array([-0.02]), offsets_B)[0] == pytest.approx(np.exp(-0.02), rel=1e-6)


def test_what_was_long_ago_is_forgotten() -> None:
    calibration, score_1 = Calibration.blank(), CENTRES_B[np.digitize(np.log([0.5]), EDGES)]
    found = []
    for accepted in (0.0, 1.0):
        for _ in range(1500):
            calibration = calibration.seen(score_1, np.array([accepted]))
        found.append(probability(score_1, calibration.offsets())[0])
    assert found[0] < 0.02
    assert found[1] > 0.9


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 9)), min_size=1, max_size=12))
def test_rising_is_isotonic_regression(pairs: list[tuple[float, float]]) -> None:
    """Its value at i is the largest over a <= i of the smallest over b >= i of the weighted mean from a to b."""
    values, weights = map(np.array, zip(*pairs, strict=True))
    size = len(values)
    mean = lambda a, b: np.average(values[a : b + 1], weights=weights[a : b + 1])  # noqa: E731
    expected = [max(min(mean(a, b) for b in range(i, size)) for a in range(i + 1)) for i in range(size)]
    np.testing.assert_allclose(rising(values, weights), expected, atol=1e-9)


# ---- the switch


def decode(switch: Switch, cycles: int, gain: float, rng: random.Random | None = None) -> tuple[float, float]:
    """Cycles of one request: share of them that drafted, and tokens per plain cycle's time. A plain one has 1."""
    tokens = time = drafted = 0.0
    for _ in range(cycles):
        if switch.drafts():
            made = gain * 1.5 * (rng.gammavariate(3, 1 / 3) if rng else 1.0)  # a drafted cycle takes 1.5
            switch.learn(True, made, 1.5, 1)
            tokens, time, drafted = tokens + made, time + 1.5, drafted + 1
        else:
            switch.learn(False, 1.0, 1.0, 1)
            tokens, time = tokens + 1, time + 1
    return drafted / cycles, tokens / time


@pytest.mark.parametrize("gain", [0.3, 0.6, 0.8, 0.9, 0.95])
def test_drafts_that_lose_cost_little(gain: float) -> None:
    switch = Switch()
    decode(switch, 2000, gain)
    assert decode(switch, 4000, gain)[1] > 0.98


@pytest.mark.parametrize("gain", [0.3, 0.5, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("made", [1.05, 1.2, 1.5])
def test_an_engine_that_has_learnt_nothing_yet_loses_little(gain: float, made: float) -> None:
    """960 tokens from the start, where a drafted cycle makes ``made``."""
    switch, tokens, time = Switch(), 0.0, 0.0
    while tokens < 960:
        drafted = switch.drafts()
        cycle = (made, made / gain) if drafted else (1.0, 1.0)
        switch.learn(drafted, *cycle, 1)
        tokens, time = tokens + cycle[0], time + cycle[1]
    assert time <= tokens / 0.98


def test_the_draft_that_reads_what_a_pause_decoded_is_not_judged_by_its_time() -> None:
    switch = Switch()
    decode(switch, 40, 0.5)
    while switch.pause:
        decode(switch, 1, 0.5)
    before = switch.lasting.value
    assert switch.drafts()
    switch.learn(True, 1.5, 60.0, 1)
    assert switch.lasting.value == before
    assert switch.lost > 50
    switch.learn(True, 1.5, 60.0, 1)
    assert switch.lasting.value < before


def test_drafts_that_bring_next_to_nothing_are_given_up_at_once() -> None:
    switch = Switch()
    for _ in range(16):
        if switch.drafts():
            switch.learn(True, 1.05, 1.15, 1)
        else:
            switch.learn(False, 1.0, 1.0, 1)
    assert switch.pause > 0


@pytest.mark.parametrize("gain", [1.05, 1.3, 2.0])
def test_drafts_that_win_go_on(gain: float) -> None:
    share, pace = decode(Switch(), 4000, gain)
    assert share > 1 - 2 / LONGEST_PEEK
    assert pace > 0.97 * gain


def test_scattered_tokens_do_not_end_drafts_that_win() -> None:
    paces = [decode(Switch(), 2000, 1.3, random.Random(seed))[1] for seed in range(20)]
    assert np.mean(paces) > 1.22
    assert min(paces) > 1.05


def test_a_text_that_turns_is_noticed() -> None:
    switch = Switch()
    decode(switch, 3000, 0.6)
    decode(switch, 1500, 1.6)
    assert decode(switch, 1000, 1.6)[0] > 0.9
    decode(switch, 2000, 0.6)
    assert decode(switch, 1000, 0.6)[0] < 0.1


# ---- the worth of a draft


def pool_of(*probs: float) -> Candidates:
    """A root that offers children with these probabilities."""
    logps_11K = torch.tensor(probs).log()[None, None]
    tokens_11K = torch.arange(len(probs))[None, None]
    root = Root(torch.tensor([9]), Offers(tokens_11K, logps_11K, logps_11K[..., 0].exp()))
    zeros_11 = torch.tensor([[0]])
    return append(plant(root), zeros_11, zeros_11, tokens_11K, logps_11K)


def worth(after: list[float], pace: float = 1.0, step: float = 0.0, child_probs=(0.5, 0.25)) -> Worth:
    offsets = [(np.array([True]), Calibration.blank().offsets())]
    return Worth(np.array(after), step, pace, offsets, np.array(child_probs), grow_width=2)


@pytest.mark.parametrize(
    ("after", "pace", "nodes"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], 1.0, 3),  # free: all there are
        ([1.0, 1.3, 1.6, 1.9, 2.2], 1.0, 1),  # 0.5 is worth 0.3, 0.25 is not
        ([1.0, 1.3, 1.6, 1.9, 2.2], 0.5, 2),  # at half the pace it is, 0.125 is not
        ([1.0, 1.3, 1.6, 1.9, 2.2], 2.0, 0),
        ([1.0, 1.6, 1.6, 1.6, 9.0], 1.0, 3),  # each alone is not, three together are
        ([1.0, 1.0], 1.0, 1),  # no more than there are prices for
    ],
)
def test_nodes_that_outweigh_their_time_are_verified(after: list[float], pace: float, nodes: int) -> None:
    assert worth(after, pace).budgets(pool_of(0.5, 0.25, 0.125)) == [nodes]


@given(
    st.lists(st.floats(1e-4, 0.99), min_size=1, max_size=8),
    st.lists(st.floats(0, 0.5), min_size=1, max_size=12),
    st.floats(0.2, 3),
)
def test_budgets_equal_brute_force(probs: list[float], costs: list[float], pace: float) -> None:
    after = np.cumsum([1.0, *costs])
    values = [sum(sorted(probs, reverse=True)[:n]) - pace * after[n] for n in range(len(after))]
    (chosen,) = worth(after.tolist(), pace).budgets(pool_of(*probs))
    assert values[chosen] == pytest.approx(max(values), abs=1e-5)


@pytest.mark.parametrize(("step", "goes_on"), [(0.0, True), (0.29, True), (0.31, False)])
def test_a_step_is_taken_for_the_nodes_that_it_promises(step: float, goes_on: bool) -> None:
    """0.5 and 0.3 would offer 0.25, 0.125, 0.15, 0.075: four nodes would have 1.2 in place of 0.9, a fifth costs 98."""
    w = worth([1.0, 1.0, 1.0, 1.0, 1.0, 99.0], step=step)
    assert w.goes_on(pool_of(0.5, 0.3, 0.1)) is goes_on
    assert w.num_steps == int(goes_on)
    assert w.root_probs_K is not None
    np.testing.assert_allclose(w.root_probs_K, [0.5, 0.3, 0.1], rtol=1e-6)


def test_a_batch_shares_what_a_node_costs() -> None:
    """Two requests: a node each is worth it for the sum of their probabilities."""
    one = pool_of(0.5, 0.1)
    both = Candidates(*(getattr(one, f).repeat(2, 1) for f in Candidates.__slots__))
    offsets = [(np.array([True, True]), Calibration.blank().offsets())]
    w = Worth(np.array([1.0, 1.8, 2.1]), 0.0, 1.0, offsets, np.array([0.5]), grow_width=1)
    assert w.budgets(both) == [1, 1]
    assert worth([1.0, 1.8, 2.1]).budgets(one) == [0]


@given(st.integers(0, 10**6))
@settings(max_examples=50)
def test_the_best_of_all_nodes_are_what_a_full_sort_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores_RC = np.where(rng.random((3, 90)) < 0.2, -np.inf, np.log(rng.random((3, 90))))
    calibrations = [Calibration.blank().seen(np.log(rng.random(50)), rng.random(50) < 0.3) for _ in range(2)]
    a, b = (c.offsets() for c in calibrations)
    w = Worth(np.zeros(21), 0.0, 1.0, [(np.array([1, 0, 1]) > 0, a), (np.array([0, 1, 0]) > 0, b)], np.ones(1), 2)
    probs_RC = np.stack([probability(s, o) for s, o in zip(scores_RC[:, 1:], (a, b, a), strict=True)])
    expected_N = -np.sort(-probs_RC, 1)[:, :20].sum(0).cumsum()
    np.testing.assert_allclose(w.values(w.best(scores_RC))[1:], expected_N, rtol=1e-12)


# ---- the policy


def test_regimes() -> None:
    assert [regime_key([0] * n)[0] for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert [warmth(Draw(t, 0)) for t in (0.0, 0.2, 0.7, 1.0)] == [0, 1, 2, 3]


def test_second_looks_that_bring_nothing_are_taken_now_and_then() -> None:
    regime = Regime.new(4)
    for _ in range(300):
        if regime.looks(extra_time=0.02):
            regime.refined.add(0.0, 1.0)
    assert sum(regime.looks(0.02) for _ in range(10 * EXPLORE)) == 10
    for _ in range(100):
        regime.refined.add(0.5, 1.0)
    assert all(regime.looks(0.02) for _ in range(20))


COSTS = CostModel((1,), (Curve((1, 65), (1.0, 2.0)),), Curve((1,), (0.1,)), Curve((1, 65), (0.05, 0.1)))


@dataclass
class World:
    """Draws cycles in which a node at depth d is accepted with the d-th of ``rates``, the chain of all of them."""

    policy: Auto
    rates: tuple[float, ...]
    rng: random.Random

    def cycle(self) -> None:
        """One request; the draft is a chain that promises 0.9 a node, of as many nodes as the policy wants."""
        plan, tokens = self.policy.plan([GREEDY], 100), 1
        size = 0
        if plan:
            pool = pool_of(*np.cumprod([0.9] * len(self.rates)))  # siblings, whose path scores are a chain's
            plan.guide.goes_on(pool)
            (size,) = plan.guide.budgets(pool)
        accepted = next((d for d in range(size) if self.rng.random() > self.rates[d]), size)
        depths_1N = torch.arange(size + 1)[None]
        scores_1N = depths_1N * np.log(0.9)
        tree = DraftTree(depths_1N, depths_1N - 1, depths_1N, depths_1N * 0, scores_1N, depths_1N >= 0)
        path_1D = torch.arange(accepted + 1)[None]
        self.policy.learn(tree, Verdict(path_1D, path_1D, torch.tensor([accepted + tokens])), 1.0)


@pytest.mark.parametrize(("rate", "low", "high"), [(0.9, 6, 8), (0.5, 1, 6), (0.01, 0, 3)])
def test_the_policy_finds_out_what_drafts_are_good_for(rate: float, low: int, high: int) -> None:
    policy = Auto(TreeConfig(budget="auto", num_steps=2, offer_width=8, num_reconsider=0), COSTS)
    world = World(policy, (rate,) * 8, random.Random(0))
    for _ in range(600):
        world.cycle()
    sizes = []
    for _ in range(100):
        world.cycle()
        if policy.cycle.worth:
            sizes.append(policy.cycle.worth.num_nodes)
    assert low <= np.mean(sizes) <= high
    assert list(policy.calibrations) == [0], "greedy requests alone were seen"


@settings(max_examples=30)
@given(st.integers(1, 20))
def test_prices_are_those_of_the_whole_batch(requests: int) -> None:
    policy = Auto(TreeConfig(budget="auto", num_reconsider=3), COSTS)
    assert policy.plan([GREEDY] * requests, 100)
    prices = policy.cycle.prices
    assert len(prices.after_N) == 64
    assert prices.plain == pytest.approx(COSTS.verify(requests, requests))
    assert prices.after_N[9] == pytest.approx(COSTS.verify(10 * requests, requests))
    assert prices.step_looking == COSTS.draft_step(9 * requests) > prices.step


def test_prices_are_those_of_the_batchs_mean_context() -> None:
    """Two requests of 30 tokens more than was measured: 2 x 30 x 0.25 for each lone root, 2 x 30 x 0.5 for 5 nodes."""
    costs = replace(COSTS, context=70.0, context_curve=Curve((1, 5), (0.25, 0.5)))
    policy = Auto(TreeConfig(budget="auto"), costs)
    near, far = ((policy.plan([GREEDY] * 2, context), policy.cycle.prices)[1] for context in (50, 100))
    assert near.after_N.tolist() == costs.verify(2 * np.arange(1, 65), 2).tolist()
    assert far.plain - near.plain == pytest.approx(2 * 30 * 0.25)
    assert far.after_N[4] - near.after_N[4] == pytest.approx(2 * 30 * 0.5)
    np.testing.assert_allclose(far.after_N, costs.verify(2 * np.arange(1, 65), 2, 100))
    assert (far.start, far.step) == (near.start, near.step)
