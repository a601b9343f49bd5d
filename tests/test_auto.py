"""Drafting that adapts gives plain decoding's tokens, whatever a policy decides; and what users see of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from secondguess.cli import main
from secondguess.config import TreeConfig
from secondguess.drafter.adaptive import AdaptiveSpeculator
from secondguess.drafter.speculator import MOST_BEHIND, EagleSpeculator
from secondguess.engine.costs import CostModel, Curve
from secondguess.engine.policy import Auto
from secondguess.engine.speculate import GREEDY, Accepted, Draw, Plain, Roots
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.methods import parse_method
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree.guide import Fixed, Plan
from secondguess.types import DraftTree, Request, SamplingParams, Verdict
from test_engine import MAX_LEN, ROOM, decode, random_requests
from test_guide import Told
from tiny_folder import save_tiny, tiny_workload

AUTO = TreeConfig(budget="auto", num_steps=5, grow_width=4, offer_width=4, num_reconsider=2)


def adaptive(target, policy, seed: int = 0, config: TreeConfig = AUTO) -> AdaptiveSpeculator:
    return AdaptiveSpeculator(tiny_drafter(target, seed), config, 3, MAX_LEN + ROOM, policy)


class Whims:
    """A policy that decides at random: no draft, any number of steps, other sizes for each request."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.plain, self.sizes = 0, set()

    def plan(self, draws: Sequence[Draw], context: float) -> Plan | None:
        if self.rng.random() < 0.3:
            self.plain += 1
            return None
        sizes = [self.rng.choice([0, 1, 3, 20]) for _ in draws]
        self.sizes.add(tuple(sizes))
        config = self.rng.choice([AUTO, parse_method("eagle3.1", AUTO).tree])
        return Plan(config, Told(self.rng.randrange(6), sizes))

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        assert seconds > 0


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(i, marks=pytest.mark.slow) for i in range(15, 40))])
def test_any_decisions_give_plain_tokens(seed: int) -> None:
    rng = random.Random(seed)
    target = tiny_target(rng.choice(["llama", "qwen2", "gemma3"]), seed, torch.float32, vocab_size=rng.choice([12, 40]))
    policy = Whims(seed)
    for temperature in (0.0, 1.0):
        requests = random_requests(rng, target.spec.vocab_size, temperature, 3)
        plain = [decode(target, Plain(), [request])[0] for request in requests]
        for one, many in zip(plain, decode(target, adaptive(target, policy, seed), requests), strict=True):
            assert many.emitted == one.emitted
            assert many.finish_reason == one.finish_reason
    assert policy.plain
    assert any(len(set(sizes)) > 1 for sizes in policy.sizes), "trees of different sizes stood side by side"


def costs(start: float, step: float, row: float) -> CostModel:
    """In plain cycles: to start a draft, a step, and a verified row."""
    return CostModel((1,), (Curve((1, 65), (1.0, 1.0 + 64 * row)),), Curve((1,), (start,)), Curve((1,), (step,)))


class Noted(Auto):
    """Is told made-up times, and keeps what it decided: steps and nodes of each draft, None where there was none."""

    def __init__(self, costs: CostModel, drafted: float, plain: float) -> None:
        super().__init__(AUTO, costs)
        self.times = {True: drafted, False: plain}
        self.decided: list[tuple[int, int] | None] = []

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        worth = self.cycle.worth
        super().learn(tree, verdict, self.times[worth is not None])
        self.decided.append((worth.num_steps, worth.num_nodes) if worth else None)


FAST, SLOW = (0.5, 1.0), (100.0, 1.0)  # seconds of a drafted and of a plain cycle


@pytest.mark.parametrize(
    ("name", "prices", "times"),
    [
        ("many", (0.0, 0.0, 0.0), FAST),
        ("few", (0.0, 0.0, 0.1), FAST),
        ("none", (0.0, 0.0, 1.0), FAST),
        ("early stop", (0.0, 0.15, 0.001), FAST),
        ("plain", (0.0, 0.0, 0.0), SLOW),
    ],
)
def test_all_decisions_of_the_policy_give_plain_tokens(name: str, prices: tuple, times: tuple) -> None:
    target, rng = tiny_target("llama", 3, torch.float32, vocab_size=12), random.Random(name)
    policy = Noted(costs(*prices), *times)
    for temperature in (0.0, 1.0):
        requests = random_requests(rng, 12, temperature, 5)
        requests.append(
            Request((1, 2), SamplingParams(temperature=temperature, seed=1, max_tokens=80, ignore_eos=True))
        )
        plain = [decode(target, Plain(), [request])[0].emitted for request in requests]
        assert [s.emitted for s in decode(target, adaptive(target, policy, 1), requests)] == plain
    drafts = [decision for decision in policy.decided if decision]
    steps, nodes = {s for s, _ in drafts}, {n for _, n in drafts}
    if name == "many":
        assert max(nodes) > 20
        assert steps == {AUTO.num_steps - 1}
    elif name == "few":
        assert 0 < max(nodes) < 20
    elif name == "none":
        assert nodes == {0}
    elif name == "early stop":
        assert len(steps) > 1
    else:
        assert (None, None) in pairwise(policy.decided), "a pause, not just a peek"


def test_nodes_and_steps_are_counted() -> None:
    target = tiny_target("llama", 3, torch.float32, vocab_size=12)

    class Twice(Whims):
        def plan(self, draws: Sequence[Draw], context: float) -> Plan:
            return Plan(AUTO, Told(2, [3] * len(draws)))

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (s,) = decode(target, adaptive(target, Twice(0)), [Request((1, 2, 3), params)])
    assert s.drafting.num_drafted == 3 * s.drafting.num_cycles
    assert s.drafting.num_steps == 3 * s.drafting.num_cycles
    fixed = EagleSpeculator(tiny_drafter(target), TreeConfig(budget=4, num_steps=2), 3, MAX_LEN + ROOM)
    (s,) = decode(target, fixed, [Request((1, 2, 3), params)])
    assert (s.drafting.num_drafted, s.drafting.num_steps) == (4 * s.drafting.num_cycles, 2 * s.drafting.num_cycles)
    (s,) = decode(target, Plain(), [Request((1, 2, 3), params)])
    assert (s.drafting.num_drafted, s.drafting.num_steps) == (0, 0)


class Awaited:
    """Drafts when it is told to."""

    drafting = False

    def plan(self, draws: Sequence[Draw], context: float) -> Plan | None:
        return Plan(AUTO, Fixed(20)) if self.drafting else None

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        pass


def test_what_was_decoded_plainly_is_read_in_pieces_and_nothing_of_it_is_lost() -> None:
    target, policy = tiny_target("llama"), Awaited()
    s = AdaptiveSpeculator(tiny_drafter(target), AUTO, 2, 4 * MOST_BEHIND, policy)
    whole = EagleSpeculator(tiny_drafter(target), replace(AUTO, budget=20), 2, 4 * MOST_BEHIND)
    count, generator = 3 * MOST_BEHIND, torch.Generator().manual_seed(1)
    taps = torch.randn(count, 3, target.spec.hidden_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(64, (count,), generator=generator)
    whole.accept([Accepted(0, tokens, taps)])
    s.accept([Accepted(0, tokens[:1], taps[:1])])
    behind = []
    for i in range(1, count):
        ids = tokens[:i].tolist()
        tree = s.draft(Roots((0,), (ids[-1],), (ids,), (GREEDY,)))
        assert tree.tokens_RN.tolist() == [ids[-1:]]
        assert s.num_steps == 0
        behind.append(s.slots[0].num_waiting)
        s.accept([Accepted(0, tokens[i : i + 1], taps[i : i + 1])])
    assert max(behind) == MOST_BEHIND
    policy.drafting = True
    root = Roots((0,), (int(tokens[-1]),), (tokens.tolist(),), (GREEDY,))
    ours, theirs = s.draft(root), whole.draft(root)
    assert torch.equal(ours.tokens_RN, theirs.tokens_RN)
    assert (ours.scores_RN - theirs.scores_RN)[ours.valid_RN].abs().max() < 1e-10


class Turning:
    """Drafts from the ``pause``-th cycle on; before, trees of a root alone, by a draft or without one."""

    def __init__(self, pause: int, without: bool) -> None:
        self.pause, self.without = pause, without
        self.emitted: list[int] = []  # tokens of each cycle

    def plan(self, draws: Sequence[Draw], context: float) -> Plan | None:
        if len(self.emitted) >= self.pause:
            return Plan(AUTO, Fixed(20))
        return None if self.without else Plan(AUTO, Told(0, [0]))

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        self.emitted.append(int(verdict.num_emitted_R))


@pytest.mark.parametrize("pause", [20, MOST_BEHIND + 40])
def test_drafts_after_a_pause_are_accepted_as_if_there_had_been_none(pause: int) -> None:
    target, length = tiny_target("llama", 3, vocab_size=12), MOST_BEHIND + 200
    request = Request((1, 2, 3), SamplingParams(temperature=1.0, seed=1, max_tokens=pause + 60, ignore_eos=True))
    policies = Turning(pause, without=True), Turning(pause, without=False)
    for policy in policies:
        s = AdaptiveSpeculator(tiny_drafter(target), AUTO, 1, length, policy)
        decode(target, s, [request], num_slots=1, max_len=length - ROOM)
    paused, unpaused = (policy.emitted for policy in policies)
    assert paused == unpaused
    assert max(paused[pause:]) > 1, "something was accepted"


# ---- for users


def test_auto_is_a_budget_of_methods_with_a_drafter() -> None:
    assert parse_method("pr:budget=auto,m=2", TreeConfig()).tree == TreeConfig(budget="auto", num_reconsider=2)
    assert parse_method("ar", TreeConfig(budget="auto")).name == "ar"
    assert TreeConfig(budget="auto").max_budget == 63
    for text, tree in (("ngram:budget=auto", TreeConfig()), ("ngram", TreeConfig(budget="auto"))):
        with pytest.raises(UserError, match="needs a drafter's probabilities"):
            parse_method(text, tree)
    with pytest.raises(UserError, match="budget must be a whole number or auto, got 'much'"):
        parse_method("pr:budget=much", TreeConfig())
    with pytest.raises(UserError, match="budget must be a whole number or auto, got 'aut'"):
        TreeConfig(budget="aut")  # type: ignore[arg-type]


def test_the_library_measures_at_start_up_and_gives_plain_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path)
    drafter, tree = tmp_path / "drafters" / "pr", TreeConfig(budget="auto", num_steps=3)
    llm = LLM(tmp_path / "target", drafter, tree=tree, max_batch_size=2, max_model_len=128)
    assert len(list((tmp_path / "cache" / "costs").iterdir())) == 1
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    outputs = llm.generate(["hello", "other", "third"], params)
    plain = LLM(tmp_path / "target", method="ar", max_model_len=128).generate(["hello", "other", "third"], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.stats.num_steps for o in outputs) > 0


def test_bench_has_a_row_for_auto(tmp_path: Path, monkeypatch, capsys) -> None:
    flags = tiny_workload(tmp_path, monkeypatch)
    methods = ("--method", "eagle3.1,pr:budget=auto", "--budget", "3,auto", "--num-steps", "3")
    assert main(["bench", *flags, *methods, "--json", "rows.json", "--batch-size", "2", "--out", "r"]) == 0
    rows = json.loads(Path("rows.json").read_text())["rows"]
    of_one = [(r["method"], r["budget"]) for r in rows if r["task"] == "one"]
    assert of_one == [("ar", 0), ("eagle3.1", 3), ("eagle3.1", "auto"), ("pr:budget=auto", "auto")]
    assert all(row["identical_to_ar"] == 1 for row in rows)
    assert [(r["mean_nodes"], r["mean_steps"]) for r in rows[:2]] == [(0, 0), (3, 3)]
    assert all(0 <= r["mean_steps"] <= 3 and r["mean_nodes"] <= 63 for r in rows)
    out = capsys.readouterr().out
    assert "nodes" in out
    assert "auto" in out
    assert main(["bench", *flags, *methods, "--batch-size", "2", "--out", "r"]) == 0, "a finished run is only reported"


def test_generate_takes_auto(tmp_path: Path, monkeypatch, capsys) -> None:
    target, *_, drafter = tiny_workload(tmp_path, monkeypatch)
    assert main(["generate", target, "hi", "--drafter", drafter, "--budget", "auto", "--max-new-tokens", "8"]) == 0
    capsys.readouterr()
    assert main(["generate", target, "hi", "--drafter", drafter, "--budget", "some"]) == 2
    assert "argument --budget: invalid int or auto value: 'some'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("eval",), ("trace", "--out", "trees.jsonl"), ("diagnose", "--out", "figures")])
def test_replays_refuse_auto(command, tmp_path: Path, monkeypatch, capsys) -> None:
    flags = tiny_workload(tmp_path, monkeypatch)
    capsys.readouterr()
    for more in (("--budget", "8,auto"), ("--method", "pr:budget=auto")):
        assert main([*command, *flags, *more]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "budget auto weighs time, and a replay takes none: give a number, or use bench" in err
