"""Drafts that a guide stops early, and trees of different sizes side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from secondguess.config import TreeConfig
from secondguess.tree import grow
from secondguess.tree.candidates import Candidates
from test_switches import Ranked, RankedStore, switched
from test_tree import Hashed, Store, configs, nodes_of, seeds


@dataclass
class Told:
    """A guide that takes so many steps and gives these budgets."""

    steps: int
    sizes: list[int]

    def goes_on(self, pool: Candidates) -> bool:
        self.steps -= 1
        return self.steps >= 0

    def budgets(self, pool: Candidates) -> list[int]:
        return self.sizes


def ranked(config: TreeConfig, seed: int, requests: list[int]) -> RankedStore:
    drafter = Ranked(seed, config.offer_width, True)
    return RankedStore(drafter, [drafter.first(i) for i in requests], switches=config.reconsider)


budgets = st.lists(st.integers(0, 14), min_size=3, max_size=3)


@settings(max_examples=200)
@given(switched(), seeds, budgets)
def test_each_request_gets_the_tree_of_its_own_budget(config: TreeConfig, seed: int, sizes: list[int]) -> None:
    store = ranked(config, seed, [0, 1, 2])
    tree = grow(config, store.root(), store, Told(99, sizes))
    assert tree.tokens_RN.shape == (3, 1 + max(sizes))
    for r, size in enumerate(sizes):
        store = ranked(config, seed, [0, 1, 2])
        alike = grow(replace(config, budget=max(size, 1)), store.root(), store)
        expected = nodes_of(alike, r) if size else nodes_of(alike, r)[:1]
        assert nodes_of(tree, r) == expected
        num_nodes = len(expected)
        assert tree.valid_RN[r].tolist() == [n < num_nodes for n in range(1 + max(sizes))], "padding is at the end"
        assert (tree.parents_RN[r, num_nodes:] == -1).all()


@settings(max_examples=100)
@given(switched(), seeds, st.integers(0, 6))
def test_a_draft_that_is_stopped_is_one_of_fewer_steps(config: TreeConfig, seed: int, steps: int) -> None:
    stopped, whole = ranked(config, seed, [0, 1]), ranked(config, seed, [0, 1])
    tree = grow(config, stopped.root(), stopped, Told(steps, [config.max_budget] * 2))
    shorter = replace(config, num_steps=min(config.num_steps, 1 + steps))
    expected = grow(shorter, whole.root(), whole)
    assert [nodes_of(tree, r) for r in range(2)] == [nodes_of(expected, r) for r in range(2)]
    assert stopped.glances == whole.glances


@given(configs, seeds)
def test_the_guide_sees_every_candidate_so_far(config: TreeConfig, seed: int) -> None:
    drafter, widths = Hashed(seed, config.offer_width, False), []

    class Watching(Told):
        def goes_on(self, pool: Candidates) -> bool:
            widths.append(pool.keys_RC.shape[1])
            return True

    store = Store(drafter, [drafter.first(0)])
    grow(config, store.root(), store, Watching(0, [1]))
    rows = [len(step[0]) for step in store.glances]
    assert len(widths) == config.num_steps - 1
    assert widths[:1] == [1 + config.offer_width][: len(widths)]
    assert all(b - a >= config.offer_width * n for a, b, n in zip(widths, widths[1:], rows, strict=False))
