"""Second looks in forwards of their own draft the same trees; what a draft does is watched step by step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from secondguess.bench.plan import Prompt
from secondguess.bench.replay import read, replay
from secondguess.bench.serial import SerialSpeculator, look_in_series
from secondguess.bench.steps import StepWatch
from secondguess.bench.transcript import TranscriptStore, record
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import save_drafter
from secondguess.llm import LLM
from secondguess.methods import open_drafter, parse_method
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import SamplingParams
from test_replay import assert_same, live_cycles

TREE = TreeConfig(budget=12, num_steps=5, grow_width=3, offer_width=3, num_reconsider=2)
PROMPTS = [Prompt("t", str(i), tuple((5 * i + 3 * j) % 63 + 1 for j in range(1 + i))) for i in range(4)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(tiny_drafter(target), folder, {"target": "tiny"})
    return folder


def make(target, drafter: Path, typed: str, serial: bool, slots: int = 1) -> LLM:
    llm = LLM(target, drafter, method=typed, tree=TREE, max_batch_size=slots, max_model_len=200)
    if serial:
        look_in_series(llm.engine)
        assert type(llm.engine.speculator) is SerialSpeculator
    return llm


@pytest.mark.parametrize(
    "typed",
    [
        "pr",
        "pr:m=0",
        "pr:m=9",
        "pr:reconsider_cap=3",
        "pr:merge=rescore_all,select=entropy",
        "pr:merge=novel_only,select=margin",
        "pr:query_rope=next,root_eligible=false,pool=any_unreconsidered",
        "pr:query_slot=soft_pred,see_own_level0=false",
        "pr:coupled=true",
    ],
)
def test_second_looks_in_series_draft_the_same_trees(target, drafter: Path, typed: str) -> None:
    together, serial = (make(target, drafter, typed, serial) for serial in (False, True))
    refined = 0
    for prompt in PROMPTS:
        cycles = [live_cycles(llm, prompt, PARAMS) for llm in (together, serial)]
        for ours, theirs in zip(*cycles, strict=True):
            assert_same(ours, theirs, 0)
            refined += int(ours.tree.levels_RN.sum())
    assert (refined > 0) == (typed != "pr:m=0")


def test_batches_draft_the_same_trees(target, drafter: Path) -> None:
    outputs = [
        make(target, drafter, "pr", serial, slots=4).generate([p.ids for p in PROMPTS], PARAMS)
        for serial in (False, True)
    ]
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.stats.num_cycles, ours.stats.num_refined) == (theirs.stats.num_cycles, theirs.stats.num_refined)


@pytest.mark.parametrize(("typed", "passes"), [("pr", TREE.num_steps - 1), ("pr:m=0", 0), ("pr:reconsider_steps=2", 2)])
def test_a_serial_draft_takes_a_forward_more_per_step_that_reconsiders(target, drafter: Path, typed, passes) -> None:
    counts, cycles = [], []
    for serial in (False, True):
        llm = make(target, drafter, typed, serial)
        speculator, seen = llm.engine.speculator, []
        forward = speculator.run  # type: ignore[attr-defined]
        speculator.run = lambda *args, forward=forward, seen=seen: seen.append(1) or forward(*args)  # type: ignore[attr-defined]
        [output] = llm.generate(PROMPTS[2].ids, PARAMS)
        counts.append(len(seen))
        cycles.append(output.stats.num_cycles)
    assert cycles[0] == cycles[1] > 3
    assert counts[1] - counts[0] == passes * cycles[0]


def test_the_looks_of_a_draft(target, drafter: Path, tmp_path: Path) -> None:
    """Parents are forwarded before children, second looks are at nodes of the step before, and nothing changes."""
    method = parse_method("pr", TREE)
    network = open_drafter(method, target, drafter)
    plain = LLM(target, method="ar", max_batch_size=4, max_model_len=200)
    texts = record(plain, PROMPTS, PARAMS, TranscriptStore(tmp_path, {}), lambda n: None)
    watch = StepWatch(network, TREE, 1, 200)
    drafts = []
    for text in texts:
        replay(watch, [read(target, text)], lambda _, trace: drafts.append((watch.steps, trace.tree)))
    assert len(drafts) > 20
    assert any(look.level for steps, _ in drafts for step in steps for look in step)
    for steps, tree in drafts:
        assert len(steps) == TREE.num_steps
        [root] = steps[0]
        assert (root.node, root.parent, root.depth, root.token) == (0, -1, 0, int(tree.tokens_RN[0, 0]))
        first = {0: root}
        for before, step in pairwise(steps):
            new = {look.node: look for look in step if look.level == 0}
            second = [look for look in step if look.level == 1]
            assert 1 <= len(new) <= TREE.grow_width
            assert len(second) <= TREE.num_reconsider
            assert not new.keys() & first.keys()
            for look in new.values():
                assert first[look.parent].depth == look.depth - 1
            for look in second:
                node = first[look.node]
                assert node in before
                assert (node.token, node.depth, node.parent) == (look.token, look.depth, look.parent)
                assert 0 < look.confidence <= 1
            first |= new


def test_watching_changes_no_tree(target, drafter: Path, tmp_path: Path) -> None:
    llms = [make(target, drafter, "pr", False) for _ in range(2)]
    network = open_drafter(parse_method("pr", TREE), target, drafter)
    llms[1].engine.speculator = StepWatch(network, TREE, 1, 250)
    for ours, theirs in zip(*(live_cycles(llm, PROMPTS[1], PARAMS) for llm in llms), strict=True):
        assert_same(ours, theirs, 0)
        assert torch.equal(ours.tree.scores_RN, theirs.tree.scores_RN)
