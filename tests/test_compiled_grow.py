"""Trees grown in compiled code are those of ``tree.grow``, in all their fields, and ask the drafter the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secondguess.config import Reconsider, TreeConfig
from secondguess.kernels.grow import Table, grow_compiled, grower, takes
from secondguess.tree import grow
from secondguess.tree.trim import PADDING
from test_guide import Told, ranked
from test_tree import Hashed, Store, configs, seeds

switches = st.builds(
    Reconsider,
    threshold=st.sampled_from((0.25, 0.5, 1.0)),
    root_eligible=st.booleans(),
    reconsider_steps=st.none() | st.integers(1, 3),
    reconsider_cap=st.none() | st.integers(1, 6),
    child_feature=st.sampled_from(("level1", "level0")),
    see_own_level0=st.booleans(),
)


@st.composite
def taken(draw: st.DrawFn) -> TreeConfig:
    config = draw(configs)
    if not config.num_reconsider:
        return replace(config, extra_advance=draw(st.integers(0, 4)))
    refined = draw(st.none() | st.integers(1, config.offer_width))
    return replace(config, reconsider=replace(draw(switches), refined_offer_width=refined))


@settings(max_examples=500, deadline=None)
@given(taken(), seeds, st.booleans(), st.integers(1, 3))
def test_trees_and_forwards_are_the_same(config: TreeConfig, seed: int, coarse: bool, num_requests: int) -> None:
    assert takes(config)
    made = []
    for growing in (grow, grow_compiled):
        drafter = Hashed(seed, config.offer_width, coarse)
        store = Store(drafter, [drafter.first(i) for i in range(num_requests)])
        made.append((growing(config, store.root(), store), store.glances))
    (expected, asked), (tree, asked_compiled) = made
    assert asked_compiled == asked
    for name in PADDING:
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    assert tree.deepest == expected.deepest


@settings(max_examples=200, deadline=None)
@given(taken(), seeds, st.integers(0, 4), st.lists(st.integers(0, 14), min_size=2, max_size=2))
def test_so_are_trees_that_a_guide_stops(config: TreeConfig, seed: int, steps: int, sizes: list[int]) -> None:
    trees = []
    for growing in (grow, grow_compiled):
        store = ranked(config, seed, [0, 1])
        trees.append(growing(config, store.root(), store, Told(steps, sizes)))
    for name in PADDING:
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name


def test_the_pool_is_what_has_been_offered() -> None:
    config, drafter = TreeConfig(num_steps=3, grow_width=2, offer_width=3, num_reconsider=1), Hashed(1, 3, True)
    store = Store(drafter, [drafter.first(0)])
    table = Table(config, store.root())
    assert table.pool().keys_RC.shape == (1, 4)
    laid = table.lay(1)
    table.absorb(laid, store(laid.rows))
    assert table.pool().scores_RC.shape == (1, 4 + 3 * 3)


@pytest.mark.parametrize(
    "config",
    [
        TreeConfig(reconsider=Reconsider(merge="union")),
        TreeConfig(reconsider=Reconsider(select="path")),
        TreeConfig(reconsider=Reconsider(pool="any_unreconsidered")),
        TreeConfig(reconsider=Reconsider(propagate=False)),
    ],
    ids=str,
)
def test_other_rules_are_left_to_tensors(config: TreeConfig) -> None:
    assert grower(config, torch.device("cpu")) is grow
    assert grower(TreeConfig(), torch.device("cpu")) is grow_compiled


def test_so_is_everything_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from secondguess.kernels import build
    from secondguess.kernels import grow as module

    def fails() -> None:
        raise build.BuildError("no C compiler")

    monkeypatch.setattr(module, "library", fails)
    assert grower(TreeConfig(), torch.device("cpu")) is grow
