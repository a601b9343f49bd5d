"""Passes as graphs give what they give otherwise; a cycle waits for the device once. On a stand-in for CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from secondguess import device
from secondguess.config import Reconsider, TreeConfig
from secondguess.drafter import speculator
from secondguess.drafter.replayed import ReplayedSpeculator, is_static
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine import graphs
from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.graphs import Replays, bucket
from secondguess.engine.sampler_state import keep
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.speculate import Plain
from secondguess.target import hf
from secondguess.target.attention import FusedAttention, Step, within_window
from secondguess.target.hf import HFTarget
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree import grow
from secondguess.types import Request, SamplingParams
from test_engine import MAX_LEN, ROOM, add, decode, random_requests
from waits import Homeless, SizedByValues, Traced, Waits

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3, num_reconsider=2)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded, attention is PyTorch's own, nobody looks at values."""
    monkeypatch.setattr(graphs, "Graph", Traced)
    monkeypatch.setattr(graphs, "new_pool", lambda: None)
    monkeypatch.setattr(hf, "usable", lambda device: True)
    monkeypatch.setattr(hf, "compiles", lambda model: False)
    monkeypatch.setattr(speculator, "grower", lambda config, device: grow)
    monkeypatch.setattr(Step, "_plan", lambda s, q, g, w: FusedAttention(within_window(s.rows, w), q, g))
    monkeypatch.setattr(device, "at_hand", lambda x: False)
    monkeypatch.setattr(Traced, "made", 0)


def tokens_of(target: HFTarget, speculator, requests: list[Request]) -> list[list[int]]:
    return [s.token_ids for s in decode(target, speculator, requests)]


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma3"))]
)
def test_texts_are_the_same(family: str, as_on_a_gpu: None, monkeypatch) -> None:
    """More requests than slots, so that they join, leave, and leave holes; all that changes scores."""
    replayed, requests = tiny_target(family), random_requests(random.Random(0), 64, 1.0, 5)
    monkeypatch.setattr(hf, "usable", lambda device: False)
    plain = tiny_target(family)
    expected = tokens_of(plain, Plain(), requests)
    assert tokens_of(replayed, Plain(), requests) == expected
    assert Traced.made
    drafts = ReplayedSpeculator(tiny_drafter(replayed), TREE, 3, MAX_LEN + ROOM)
    assert tokens_of(replayed, drafts, requests) == expected
    assert drafts._replays._graphs


@pytest.mark.parametrize("coupled", [False, True])
def test_drafts_are_the_same(coupled: bool, as_on_a_gpu: None) -> None:
    target = tiny_target("llama")
    drafter, tree = tiny_drafter(target), TreeConfig(budget=12, num_steps=3, grow_width=3, coupled=coupled)
    kinds = (EagleSpeculator, ReplayedSpeculator)
    runs = [Scheduler(make_engine(target, kind(drafter, tree, 3, MAX_LEN + ROOM)), MAX_LEN) for kind in kinds]
    for s in runs:
        for i in range(5):
            params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=12, ignore_eos=True)
            add(s, Request(tuple(range(1, 4 + i)), params))
    while runs[0].busy:
        for s in runs:
            s.step()
        ours, theirs = (s.engine.last for s in runs)
        assert (ours is None) == (theirs is None)
        if ours and theirs:
            for name in ("tokens_RN", "parents_RN", "depths_RN", "levels_RN", "valid_RN"):
                assert torch.equal(getattr(ours.tree, name), getattr(theirs.tree, name)), name
            torch.testing.assert_close(ours.tree.scores_RN, theirs.tree.scores_RN, rtol=0, atol=1e-5)


def make_engine(target: HFTarget, speculator) -> Engine:
    return Engine(target, speculator, target.new_cache(3, MAX_LEN + ROOM))


def test_slots_that_take_no_part_keep_their_columns(as_on_a_gpu: None) -> None:
    """Slots 0 and 2 are drafted for, slot 1 waits with what it has read."""
    target = tiny_target("llama")
    drafts = ReplayedSpeculator(tiny_drafter(target), TREE, 3, MAX_LEN + ROOM)
    engine = make_engine(target, drafts)
    s = Scheduler(engine, MAX_LEN)
    for i in range(3):
        add(s, Request((1 + i, 2, 3, 4, 5), SamplingParams(max_tokens=80, ignore_eos=True)))
    for _ in range(3 + 4):
        s.step()
    assert s.batch
    before = [x.clone() for x in (*engine.cache.stores(0), *drafts.cache.stores(0))]
    read, cached = drafts.slots[1].num_columns, s.batch.sequences[1].num_cached
    s.batch = Batch([s.batch.sequences[i] for i in (0, 2)], keep(s.batch.sampler, [0, 2]))
    for _ in range(6):
        s.step()
    after = (*engine.cache.stores(0), *drafts.cache.stores(0))
    for old, new, end in zip(before, after, (cached, cached, read, read), strict=True):
        assert torch.equal(old[1, :, :end], new[1, :, :end])
        assert not torch.equal(old[0], new[0])


@pytest.mark.parametrize("kind", [EagleSpeculator, ReplayedSpeculator])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cycle_waits_once(kind, temperature: float, as_on_a_gpu: None) -> None:
    target = tiny_target("llama")
    engine = make_engine(target, kind(tiny_drafter(target), TREE, 3, MAX_LEN + ROOM))
    s = Scheduler(engine, MAX_LEN)
    for i in range(3):
        params = SamplingParams(temperature=temperature, top_k=20, seed=i, max_tokens=60, ignore_eos=True)
        add(s, Request((1 + i, 2, 3), params))
    for _ in range(3 + 6):  # until everything is recorded
        s.step()
    assert s.batch
    with Waits() as waits:
        run_cycle(engine, s.batch)
    assert len(waits.places) == 1, waits.places
    assert waits.places[0].startswith("engine/cycle.py"), waits.places
    with SizedByValues() as sized:
        run_cycle(engine, s.batch)
    assert sized.places == []


@pytest.mark.parametrize("kind", [EagleSpeculator, ReplayedSpeculator])
def test_a_cycle_makes_nothing_on_the_cpu(kind, as_on_a_gpu: None) -> None:
    """But for the numbers that ``upload`` sends."""
    target = tiny_target("llama")
    engine = make_engine(target, kind(tiny_drafter(target), TREE, 3, MAX_LEN + ROOM))
    s = Scheduler(engine, MAX_LEN)
    with Homeless() as homeless:
        for i in range(3):
            add(s, Request((1 + i, 2, 3), SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=9)))
        while s.busy:
            s.step()
    assert {place for place in homeless.places if not place.startswith("device.py")} == set()


def test_which_calls_are_recorded(as_on_a_gpu: None) -> None:
    calls: list[int] = []

    def work(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        return (x * 2,)

    replays = Replays()
    for number in range(4):
        assert replays("a", work, torch.tensor([number]))[0].tolist() == [2 * number]
    assert Traced.made == 1
    assert len(calls) == 2  # once as it is, once to be recorded
    assert replays("b", work, torch.tensor([1, 2]))[0].tolist() == [2, 4]
    assert Traced.made == 1


def test_what_asks_the_device_cannot_be_recorded(as_on_a_gpu: None) -> None:
    replays = Replays()
    work = lambda x: (x[: int(x[0])],)  # noqa: E731
    replays("a", work, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError):
        replays("a", work, torch.tensor([2, 2]))


def test_buckets() -> None:
    assert [bucket(n, 1, 6) for n in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
    assert [bucket(n, 256, 8242) for n in (1, 256, 257, 8192, 8200)] == [256, 256, 512, 8192, 8242]


def test_drafts_that_cannot_be_recorded() -> None:
    assert is_static(TREE)
    assert not is_static(TreeConfig(reconsider=Reconsider(reconsider_cap=3)))
    assert not is_static(TreeConfig(reconsider=Reconsider(pool="any_unreconsidered")))
