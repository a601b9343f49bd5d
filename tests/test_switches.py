"""Every reading of reconsideration against plain Python, on offers that a fake drafter makes up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from reference import Look
from secondguess.bench.sweep import second_looks
from secondguess.config import Reconsider, TreeConfig
from secondguess.fields import choices
from secondguess.methods import parse_method
from secondguess.tree import DraftRows, Offers, Root, child_with, grow
from secondguess.tree.candidates import Candidates, Picks, marked, pack
from secondguess.tree.cut import best_by_turns, best_of_all
from secondguess.types import DraftTree
from test_tree import VOCAB, Hashed, Store, expected_nodes, nodes_of, offers, seeds, tree_of

MISSING = float("-inf")
SURE = (0.0, 0.25, 0.5, 0.9375)
WORDS = choices(Reconsider)


class Ranked(Hashed):
    """A fake drafter that has an opinion of every token."""

    def draw(self, rng: random.Random) -> Look:
        tokens = rng.sample(range(VOCAB), VOCAB)
        logps = sorted((self.logp(rng) for _ in tokens), reverse=True)
        ranking = tuple(zip(tokens, logps, strict=True))
        children = ranking[: self.num_offers]
        return Look(rng.getrandbits(48), children, rng.choice(SURE), rng.randrange(4) / 4, ranking)


@dataclass
class RankedStore(Store):
    """Answers what merging and selecting ask about, and nothing that they do not ask about."""

    switches: Reconsider = field(default_factory=Reconsider)
    looks: list[list[Look]] = field(default_factory=list)  # of the last forward

    def root(self) -> Root:
        root = super().root()
        return Root(root.tokens_R, self.doubted(root.offers, [[look] for look in self.roots]))

    def __call__(self, rows: DraftRows) -> Offers:
        self.looks = [[] for _ in self.roots]
        assert (rows.known_tokens_RMK is not None) == self.switches.asks_for_known
        made = self.doubted(super().__call__(rows), self.looks)
        if not self.switches.rates_known:
            return made
        return replace(made, known_logps_RMK=self.opinions(rows))

    def look(self, rows: DraftRows, r: int, x: int) -> Look:
        look = super().look(rows, r, x)
        if self.switches.offers_novel and x >= rows.num_level0 and look.ranking:
            known = known_tokens(rows)[r][x - rows.num_level0]
            novel = [(t, p) for t, p in look.ranking if t not in known][: self.drafter.num_offers]
            rest = [(t, np.float32(MISSING)) for t in known]
            look = replace(look, children=tuple(novel + rest)[: self.drafter.num_offers])
        self.looks[r].append(look)
        return look

    def doubted(self, made: Offers, looks: list[list[Look]]) -> Offers:
        if self.switches.select not in ("entropy", "margin"):
            return made
        return replace(made, doubt_RX=torch.tensor([[look.doubt for look in row] for row in looks]))

    def opinions(self, rows: DraftRows) -> Tensor:
        """Level 1's log-probs of the known tokens; of padding something that must not matter."""
        return torch.tensor([
            [[float(dict(look.ranking).get(t, 0)) for t in known] for look, known in zip(row, tokens, strict=True)]
            for row, tokens in zip([row[rows.num_level0 :] for row in self.looks], known_tokens(rows), strict=True)
        ]).reshape(known_shape(rows))  # fmt: skip


def known_tokens(rows: DraftRows) -> list[list[list[int]]]:
    assert rows.known_tokens_RMK is not None
    return rows.known_tokens_RMK.tolist()


def known_shape(rows: DraftRows) -> torch.Size:
    assert rows.known_tokens_RMK is not None
    return rows.known_tokens_RMK.shape


@st.composite
def switched(draw: st.DrawFn) -> TreeConfig:
    """Any tree with any combination of switches."""
    offer_width, num_reconsider = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    shape = {
        "budget": draw(st.integers(1, 14)),
        "num_steps": draw(st.integers(1, 5)),
        "grow_width": draw(st.integers(1, 5)),
        "offer_width": offer_width,
        "num_reconsider": num_reconsider,
    }
    if num_reconsider == 0:
        return TreeConfig(**shape, extra_advance=draw(st.integers(0, 4)))
    switches: dict[str, Any] = {name: draw(st.sampled_from(words)) for name, words in WORDS.items()}
    switches |= {name: draw(st.booleans()) for name in ("propagate", "root_eligible", "see_own_level0")}
    switches |= {name: draw(st.none() | st.integers(1, 4)) for name in ("reconsider_steps", "reconsider_cap")}
    switches["threshold"] = draw(st.sampled_from([0.0, 0.25, 0.6, 1.0]))
    switches["refined_offer_width"] = draw(st.none() | st.integers(1, offer_width))
    return TreeConfig(**shape, reconsider=Reconsider(**switches))


def draft(config: TreeConfig, seed: int, coarse: bool, requests: list[int]) -> tuple[DraftTree, RankedStore]:
    drafter = Ranked(seed, config.offer_width, coarse)
    store = RankedStore(drafter, [drafter.first(i) for i in requests], switches=config.reconsider)
    return grow(config, store.root(), store), store


def check(config: TreeConfig, seed: int, coarse: bool) -> None:
    """The tree and all that every row depended on, against plain Python."""
    tree, store = draft(config, seed, coarse, [0])
    grower = reference.Grower(config, 0, store.roots[0], store.drafter)
    assert nodes_of(tree, 0) == expected_nodes(grower.run())
    assert [step[0] for step in store.glances] == grower.glances


@settings(max_examples=400)
@given(switched(), seeds, st.booleans())
def test_any_combination_equals_the_plain_python_loop(config: TreeConfig, seed: int, coarse: bool) -> None:
    check(config, seed, coarse)


@st.composite
def patient(draw: st.DrawFn) -> TreeConfig:
    """Drafts in which a node may wait for its second look until it has grandchildren."""
    switches: dict[str, Any] = {name: draw(st.sampled_from(WORDS[name])) for name in ("merge", "select")}
    shape: dict[str, Any] = {name: draw(st.integers(1, 3)) for name in ("num_reconsider", "grow_width", "offer_width")}
    reconsider = Reconsider(**switches, pool="any_unreconsidered", propagate=draw(st.booleans()))
    return TreeConfig(**shape, budget=20, num_steps=draw(st.integers(4, 7)), reconsider=reconsider)


@settings(max_examples=200)
@given(patient(), seeds, st.booleans())
def test_late_second_looks_equal_the_plain_python_loop(config: TreeConfig, seed: int, coarse: bool) -> None:
    check(config, seed, coarse)


@pytest.mark.parametrize("typed", second_looks(offer_width=3))
@settings(max_examples=8)
@given(seed=seeds, coarse=st.booleans())
def test_each_switch_alone_equals_the_plain_python_loop(typed: str, seed: int, coarse: bool) -> None:
    small = TreeConfig(budget=14, num_steps=5, grow_width=3, offer_width=3, num_reconsider=2)
    check(parse_method(typed, small).tree, seed, coarse)


def drafted(config: TreeConfig, seed: int) -> tuple:
    tree, store = draft(config, seed, False, [0])
    return nodes_of(tree, 0), store.glances


@pytest.mark.parametrize("typed", second_looks(offer_width=3))
def test_each_switch_changes_some_draft(typed: str) -> None:
    """Otherwise the equality above would say little. What the drafter alone does is tested with the drafter."""
    tree = parse_method(typed, TreeConfig(num_steps=6, grow_width=4, offer_width=3)).tree
    if tree.reconsider.query_slot != "self_query" or tree.reconsider.query_rope != "same":
        return
    plain = replace(tree, reconsider=Reconsider(), extra_advance=0, grow_width=4, num_reconsider=3)
    assert any(drafted(plain, seed) != drafted(tree, seed) for seed in range(40))


@settings(max_examples=100)
@given(switched(), seeds, st.booleans())
def test_a_batch_equals_each_request_alone(config: TreeConfig, seed: int, coarse: bool) -> None:
    batch, _ = draft(config, seed, coarse, [0, 1, 2])
    for r in range(3):
        drafter = Ranked(seed, config.offer_width, coarse)
        store = RankedStore(drafter, [drafter.first(r)], switches=config.reconsider)
        alone = grow(config, replace(store.root(), tokens_R=torch.tensor([r])), store)
        assert nodes_of(batch, r) == nodes_of(alone, 0)


@settings(max_examples=100)
@given(switched(), seeds)
def test_a_tree_is_well_formed(config: TreeConfig, seed: int) -> None:
    tree, _ = draft(config, seed, True, [0, 1])
    assert tree.tokens_RN.shape == (2, 1 + config.max_budget)
    for r in range(2):
        nodes, size = nodes_of(tree, r), int(tree.valid_RN[r].sum())
        assert tree.valid_RN[r, :size].all(), "padding is at the end"
        assert nodes[0] == (r, -1, 0, 0.0, 0)
        assert all(0 <= parent < n for n, (_, parent, *_) in enumerate(nodes[1:], 1)), "parents come first"
        siblings = {(parent, token) for token, parent, *_ in nodes}
        assert len(siblings) == size or config.reconsider.merge == "append", "siblings are distinct"
        if config.reconsider.propagate:
            assert all(score <= nodes[parent][3] for _, parent, _, score, _ in nodes[1:])


def second_look(**switches) -> tuple[DraftTree, list[DraftRows]]:
    """Root 9 offers 1 and 2, and 1, grown first, 4. The root's second look says: 2, 3, 1."""
    seen: list[DraftRows] = []
    level1 = {2: -0.25, 3: -1.0, 1: -3.0}
    config = TreeConfig(
        budget=6, num_steps=3, grow_width=1, offer_width=2, num_reconsider=1, reconsider=Reconsider(**switches)
    )

    def forward(rows: DraftRows) -> Offers:
        seen.append(rows)
        if len(seen) > 1:
            num_rows = rows.tokens_RX.shape[1]
            return offers(*[[(5, MISSING), (6, MISSING)]] * num_rows, confidence=(0.5,) * num_rows)
        told = [(3, -1.0), (8, -4.0)] if config.reconsider.offers_novel else [(2, -0.25), (3, -1.0)]
        num_rows = rows.tokens_RX.shape[1]
        made = offers(*[[(4, -1.0), (5, MISSING)], told][:num_rows], confidence=(0.5, 0.5)[:num_rows])
        if rows.known_tokens_RMK is None:
            return made
        if not config.reconsider.rates_known:
            return made
        return replace(made, known_logps_RMK=torch.tensor([[[level1[t] for t in known_tokens(rows)[0][0]]]]))

    root = Root(torch.tensor([9]), offers([(1, -1.0), (2, -2.0)], confidence=(0.5,)))
    return grow(config, root, forward), seen


@pytest.mark.parametrize(
    ("switches", "expected"),
    [  # (token, path score, level) of every node, the root left out
        ({}, [(1, -1.0, 0), (2, -0.25, 1), (4, -2.0, 0), (3, -1.0, 1)]),
        ({"merge": "drop"}, [(1, -1.0, 0), (2, -2.0, 0), (4, -2.0, 0), (3, -1.0, 1)]),
        ({"merge": "logmean"}, [(1, -1.0, 0), (2, -1.125, 1), (4, -2.0, 0), (3, -1.0, 1)]),
        ({"merge": "append"}, [(1, -1.0, 0), (2, -2.0, 0), (4, -2.0, 0), (2, -0.25, 1), (3, -1.0, 1)]),
        ({"refined_offer_width": 1}, [(1, -1.0, 0), (2, -0.25, 1), (4, -2.0, 0)]),
        ({"threshold": 0.4}, [(1, -1.0, 0), (2, -2.0, 0), (4, -2.0, 0)]),
        ({"root_eligible": False}, [(1, -1.0, 0), (2, -2.0, 0), (4, -2.0, 0)]),
        ({"merge": "rescore_all"}, [(1, -3.0, 1), (2, -0.25, 1), (4, -4.0, 0), (3, -1.0, 1)]),
        ({"merge": "rescore_all", "propagate": False}, [(1, -3.0, 1), (2, -0.25, 1), (4, -2.0, 0), (3, -1.0, 1)]),
        ({"merge": "novel_only"}, [(1, -1.0, 0), (2, -2.0, 0), (4, -2.0, 0), (3, -1.0, 1), (8, -4.0, 1)]),
        ({"merge": "union"}, [(1, -1.0, 0), (2, -0.25, 1), (4, -2.0, 0), (3, -1.0, 1), (8, -4.0, 1)]),
    ],
)
def test_a_second_look_at_the_root(switches: dict, expected: list) -> None:
    tree, _ = second_look(**switches)
    assert [(token, score, level) for token, _, _, score, level in nodes_of(tree, 0)[1:]] == expected


def test_rows_of_a_second_look() -> None:
    _, seen = second_look(child_feature="level0", see_own_level0=False)
    assert seen[0].visible_RXY.int().tolist() == [[[1, 1, 0], [0, 0, 1]]], "the root's own row is hidden from it"
    assert seen[1].tokens_RX[0, 0] == 2
    assert seen[1].feature_rows_RX[0, 0] == 0, "won by level 1, fed by level 0"
    assert seen[1].visible_RXY[0, 0].int().tolist() == [1, 0, 0, 1, 0]
    _, seen = second_look(merge="novel_only")
    assert known_tokens(seen[0]) == [[[1, 2]]]


def test_padding_marks_nothing_and_hides_nothing() -> None:
    nodes_RX = torch.tensor([[2, 1, 2], [0, 3, 3]])
    picks = Picks(nodes_RX, nodes_RX, torch.tensor([[True, False, False], [False, False, True]]))
    assert marked(picks, 4).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


def candidates(nodes: list[tuple[int, float]]) -> Candidates:
    """A table of (parent, path score) per candidate; 0 is the root. Tokens are distinct."""
    depths = [0]
    for parent, _ in nodes[1:]:
        depths.append(depths[parent] + 1)
    parents_RC, depths_RC = torch.tensor([[parent for parent, _ in nodes]]), torch.tensor([depths])
    keys_RC, scores_RC = pack(depths_RC, parents_RC, torch.arange(len(nodes))), torch.tensor([[s for _, s in nodes]])
    return Candidates(keys_RC, scores_RC, scores_RC, *(torch.zeros_like(keys_RC) for _ in range(3)))


def kept(index_RN: Tensor, num_candidates: int) -> list[int]:
    return [i for i in index_RN[0].sort().values.tolist() if i < num_candidates]


def test_a_child_above_its_parent_waits_for_it() -> None:
    """3 scores best and hangs below 2, the worst; 4 hangs below 1."""
    pool = candidates([(0, 0.0), (0, -2.0), (0, -9.0), (2, -1.0), (1, -3.0)])
    whole = [0, 1, 2, 3, 4]
    for budget, expected in ((1, [0, 1]), (2, [0, 1, 4]), (3, [0, 1, 2, 4]), (4, whole), (9, whole)):
        assert kept(best_by_turns(pool, torch.tensor([[budget]]), 1 + budget), 5) == expected, budget


@given(seeds, st.integers(1, 12))
def test_both_ways_to_cut_agree_where_no_score_is_above_its_parents(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    nodes = [(0, 0.0)]
    for n in range(1, 20):
        parent = rng.randrange(n)
        nodes.append((parent, nodes[parent][1] - rng.randrange(3) / 4))
    pool = candidates(nodes)
    limits = torch.tensor([[budget]]), 13  # room for more than this request gets
    assert kept(best_by_turns(pool, *limits), 20) == kept(best_of_all(pool, *limits), 20)


def test_of_equal_siblings_the_first_is_walked() -> None:
    tree = tree_of(torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([[7, 2, 2, 3, 4]]))
    assert child_with(tree, torch.tensor([0]), torch.tensor([2])).tolist() == [1]
