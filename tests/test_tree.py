"""The draft tree against plain Python.

The fake drafter answers from a hash of all that a row depends on (level, token, input feature, depth, rows seen), so
wrong bookkeeping anywhere changes the tree. Coarse log-probs make equal scores common.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from reference import Glance, Look, sorted_tuple
from secondguess.config import TreeConfig
from secondguess.tree import DraftRows, Offers, Root, ancestors_or_self, child_with, grow, walk
from secondguess.tree.candidates import Picks, append, plant
from secondguess.tree.merge import refine
from secondguess.tree.trim import PADDING
from secondguess.types import DraftTree

VOCAB = 7


@dataclass(frozen=True)
class Hashed:
    """A drafter without a network. ``coarse`` log-probs are multiples of 1/4, and some offers are missing (-inf)."""

    seed: int
    num_offers: int
    coarse: bool

    def __call__(self, glance: Glance) -> Look:
        return self.draw(random.Random(f"{self.seed} {glance}"))

    def first(self, index: int) -> Look:
        return self.draw(random.Random(f"{self.seed} root {index}"))

    def draw(self, rng: random.Random) -> Look:
        tokens = rng.sample(range(VOCAB), self.num_offers)
        logps = sorted((self.logp(rng) for _ in tokens), reverse=True)
        children = tuple(zip(tokens, logps, strict=True))
        return Look(rng.getrandbits(48), children, rng.randrange(4) / 4)

    def logp(self, rng: random.Random) -> np.float32:
        if rng.random() < 0.1:
            return np.float32(-math.inf)
        return np.float32(-rng.randrange(8) / 4 if self.coarse else -rng.expovariate(1.0))


def stack(looks: list[list[Look]]) -> Offers:
    return Offers(
        torch.tensor([[[t for t, _ in look.children] for look in row] for row in looks]),
        torch.tensor(np.array([[[p for _, p in look.children] for look in row] for row in looks], dtype=np.float32)),
        torch.tensor([[look.confidence for look in row] for row in looks]),
    )


@dataclass
class Store:
    """``forward`` over the fake drafter: keeps the features of all rows, and notes what each valid row depended on."""

    drafter: Hashed
    roots: list[Look]
    glances: list[list[list[Glance]]] = field(default_factory=list)  # [step][request]

    def __post_init__(self) -> None:
        self.features = [[look.feature] for look in self.roots]

    def root(self) -> Root:
        return Root(torch.arange(len(self.roots)), stack([[look] for look in self.roots]))

    def __call__(self, rows: DraftRows) -> Offers:
        num_old = len(self.features[0])
        num_new = rows.tokens_RX.shape[1]
        assert rows.visible_RXY.shape[1:] == (num_new, num_old + num_new)
        assert rows.visible_RXY.diagonal(num_old, 1, 2).all(), "every row sees itself"
        assert not rows.visible_RXY[:, :, num_old:].logical_xor(torch.eye(num_new, dtype=torch.bool)).any()
        self.glances.append([[] for _ in self.roots])
        looks = [[self.look(rows, r, x) for x in range(num_new)] for r in range(len(self.roots))]
        for features, row in zip(self.features, looks, strict=True):
            features.extend(look.feature for look in row)
        return stack(looks)

    def look(self, rows: DraftRows, r: int, x: int) -> Look:
        fed = self.features[r][rows.feature_rows_RX[r, x]]
        if not rows.valid_RX[r, x]:  # must not matter
            return Look(-1, tuple((t, np.float32(0)) for t in range(self.drafter.num_offers)), 0.0)
        level = int(x >= rows.num_level0)
        seen = sorted_tuple(f for f, v in zip(self.features[r], rows.visible_RXY[r, x].tolist(), strict=False) if v)
        token = None if level else int(rows.tokens_RX[r, x])
        glance = Glance(level, token, fed, int(rows.depths_RX[r, x]), seen)
        self.glances[-1][r].append(glance)
        return self.drafter(glance)


configs = st.builds(
    TreeConfig,
    budget=st.integers(1, 14),
    num_steps=st.integers(1, 5),
    grow_width=st.integers(1, 5),
    offer_width=st.integers(1, 4),
    num_reconsider=st.integers(0, 4),
)
seeds = st.integers(0, 2**32)


def draft(config: TreeConfig, seed: int, coarse: bool, requests: list[int]) -> tuple[DraftTree, Store]:
    drafter = Hashed(seed, config.offer_width, coarse)
    store = Store(drafter, [drafter.first(i) for i in requests])
    return grow(config, store.root(), store), store


def nodes_of(tree: DraftTree, r: int) -> list[tuple]:
    """(token, parent, depth, score, level) of every valid node."""
    columns = (tree.tokens_RN, tree.parents_RN, tree.depths_RN, tree.scores_RN, tree.levels_RN)
    return list(zip(*(c[r][tree.valid_RN[r]].tolist() for c in columns), strict=True))


def expected_nodes(nodes: list[reference.Node]) -> list[tuple]:
    return [(n.token, nodes.index(n.parent) if n.parent else -1, n.depth, float(n.score), n.level) for n in nodes]


@settings(max_examples=500, deadline=None)
@given(configs, seeds, st.booleans())
def test_equals_the_plain_python_loop(config: TreeConfig, seed: int, coarse: bool) -> None:
    tree, store = draft(config, seed, coarse, [0])
    grower = reference.Grower(config, 0, store.roots[0], store.drafter)
    assert nodes_of(tree, 0) == expected_nodes(grower.run())
    assert [step[0] for step in store.glances] == grower.glances


@settings(max_examples=100, deadline=None)
@given(configs, seeds, st.booleans())
def test_without_reconsideration_is_eagle2_bit_for_bit(config: TreeConfig, seed: int, coarse: bool) -> None:
    config = replace(config, num_reconsider=0)
    tree, store = draft(config, seed, coarse, [0])
    expected = reference.eagle2_expansion(config, 0, store.roots[0], store.drafter)
    assert nodes_of(tree, 0) == [(*node, 0) for node in expected]
    assert tree.scores_RN.dtype == torch.float32


@settings(max_examples=100, deadline=None)
@given(configs, seeds, st.booleans())
def test_a_batch_equals_each_request_alone(config: TreeConfig, seed: int, coarse: bool) -> None:
    batch, store = draft(config, seed, coarse, [0, 1, 2])
    for r in range(3):
        root = Root(torch.tensor([r]), stack([[store.roots[r]]]))
        alone = grow(config, root, Store(store.drafter, [store.roots[r]]))
        for name in PADDING:
            assert torch.equal(getattr(batch, name)[r], getattr(alone, name)[0]), name


@settings(max_examples=100, deadline=None)
@given(configs, seeds)
def test_a_tree_is_well_formed(config: TreeConfig, seed: int) -> None:
    tree, _ = draft(config, seed, True, [0, 1, 2])
    assert tree.tokens_RN.shape == (3, 1 + config.max_budget)
    for r in range(3):
        nodes, size = nodes_of(tree, r), int(tree.valid_RN[r].sum())
        assert tree.valid_RN[r, :size].all(), "padding is at the end"
        assert (tree.parents_RN[r, size:] == -1).all()
        assert not torch.stack((tree.tokens_RN, tree.depths_RN, tree.levels_RN))[:, r, size:].any()
        assert nodes[0] == (r, -1, 0, 0.0, 0)
        assert len({(parent, token) for token, parent, *_ in nodes}) == size, "siblings are distinct"
        for n, (_, parent, depth, score, _) in enumerate(nodes[1:], 1):
            assert 0 <= parent < n, "parents come first and are in the tree"
            assert depth == nodes[parent][2] + 1
            assert score <= nodes[parent][3]


def offers(*rows: list[tuple[int, float]], confidence: tuple[float, ...]) -> Offers:
    return stack(
        [[Look(0, tuple((t, np.float32(p)) for t, p in row), c) for row, c in zip(rows, confidence, strict=True)]]
    )


def test_a_won_edge_is_rescored_and_feeds_its_child_from_level_1() -> None:
    """Root 9 offers 1 and 2; only 1 is grown at first. The second look at the root raises both and adds 3."""
    seen: list[DraftRows] = []
    replies = iter(
        [
            offers([(4, -1.0), (5, -1.0)], [(2, -0.25), (1, -0.5)], confidence=(0.5, 0.5)),
            offers([(6, -4.0), (7, -5.0)], [(8, -3.0), (4, -1.0)], confidence=(0.5, 0.5)),
        ]
    )

    def forward(rows: DraftRows) -> Offers:
        seen.append(rows)
        return next(replies)

    root = Root(torch.tensor([9]), offers([(1, -1.0), (2, -2.0)], confidence=(0.5,)))
    tree = grow(TreeConfig(budget=5, num_steps=3, grow_width=1, offer_width=2, num_reconsider=1), root, forward)
    assert seen[0].tokens_RX.tolist() == [[1, 9]]
    assert seen[0].feature_rows_RX.tolist() == [[0, 0]]
    assert seen[0].visible_RXY.int().tolist() == [[[1, 1, 0], [1, 0, 1]]]
    assert seen[1].tokens_RX.tolist() == [[2, 1]]
    assert seen[1].feature_rows_RX.tolist() == [[2, 1]], "2 is fed by the root's level 1, 1's second look by 1"
    assert seen[1].visible_RXY.int().tolist() == [[[1, 0, 0, 1, 0], [1, 1, 0, 0, 1]]]
    assert seen[1].depths_RX.tolist() == [[1, 1]]
    assert tree.tokens_RN.tolist() == [[9, 1, 2, 4, 5, 8]]
    assert tree.parents_RN.tolist() == [[-1, 0, 0, 1, 1, 1]]
    assert tree.levels_RN.tolist() == [[0, 1, 1, 0, 0, 1]], "an equal log-prob (4) leaves the edge to level 0"
    assert tree.scores_RN.tolist() == [[0.0, -0.5, -0.25, -1.5, -1.5, -3.5]]


def test_refining_rescores_edges_and_paths_together() -> None:
    root = Root(torch.tensor([9]), offers([(1, -1.0), (2, -2.0)], confidence=(0.5,)))
    zeros_R1 = torch.tensor([[0]])
    pool = append(plant(root), zeros_R1, zeros_R1, root.offers.tokens_RXK, root.offers.logps_RXK)
    again = offers([(2, -0.5), (3, -0.75)], confidence=(0.5,))
    hesitant = Picks(zeros_R1, zeros_R1, zeros_R1 == 0)
    refined, novel_logps_RMK = refine(pool, hesitant, again.tokens_RXK, again.logps_RXK, torch.tensor([1]))
    assert refined.logps_RC.tolist() == refined.scores_RC.tolist() == [[0.0, -1.0, -0.5]]
    assert refined.holders_RC.tolist() == [[0, 0, 1]]
    assert refined.fresh_RC.tolist() == [[False, False, True]]
    assert novel_logps_RMK.tolist() == [[[-math.inf, -0.75]]]


def test_equal_scores_go_to_the_shallower_then_the_older_parent_then_the_smaller_token() -> None:
    rows = [[(8, 0.0), (2, 0.0)], [(3, 0.0), (1, 0.0)]]
    root = Root(torch.tensor([0]), offers([(6, 0.0), (5, 0.0)], confidence=(1.0,)))
    for budget, kept in ((1, [5]), (2, [6, 5]), (3, [6, 5, 1]), (4, [6, 5, 3, 1]), (5, [6, 5, 2, 3, 1])):
        config = TreeConfig(budget=budget, num_steps=2, grow_width=2, offer_width=2, num_reconsider=0)
        tree = grow(config, root, lambda asked: offers(*rows, confidence=(1.0, 1.0)))
        assert tree.tokens_RN[0, 1:].tolist() == kept, budget


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_request_without_offers_is_a_lone_root(num_steps: int) -> None:
    nothing = [(0, -math.inf), (1, -math.inf)]
    root = Root(torch.tensor([3]), offers(nothing, confidence=(0.0,)))

    def forward(rows: DraftRows) -> Offers:
        num_rows = rows.tokens_RX.shape[1]
        return offers(*[nothing] * num_rows, confidence=(0.0,) * num_rows)

    tree = grow(TreeConfig(budget=4, num_steps=num_steps, offer_width=2), root, forward)
    assert tree.valid_RN.tolist() == [[True, False, False, False, False]]
    assert tree.tokens_RN.tolist() == [[3, 0, 0, 0, 0]]


def test_rows_are_never_padded_without_reconsideration_when_offers_suffice() -> None:
    config = TreeConfig(num_reconsider=0)
    widths: list[int] = []

    def forward(rows: DraftRows) -> Offers:
        widths.append(rows.tokens_RX.shape[1])
        assert rows.valid_RX.all()
        assert rows.num_level0 == widths[-1]
        return stack([[Look(0, tuple((t, np.float32(-t - 1)) for t in range(6)), 0.5)] * widths[-1]])

    grow(
        config, Root(torch.tensor([0]), stack([[Look(0, tuple((t, np.float32(-1)) for t in range(6)), 0.5)]])), forward
    )
    assert widths == [6] * 7


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 20))
    return [-1, *(draw(st.integers(0, n - 1)) for n in range(1, size)), *[-1] * draw(st.integers(0, 3))]


@settings(max_examples=100, deadline=None)
@given(parent_lists())
def test_ancestors_equal_brute_force(parents: list[int]) -> None:
    chain = [-1, *range(len(parents) - 1)]
    got_RNN = ancestors_or_self(torch.tensor([parents, chain]))
    assert got_RNN.tolist() == [reference.ancestors_or_self(parents), reference.ancestors_or_self(chain)]


def tree_of(parents_RN: Tensor, tokens_RN: Tensor) -> DraftTree:
    depths_RN = ancestors_or_self(parents_RN).sum(2) - 1
    zeros_RN = torch.zeros_like(parents_RN)
    return DraftTree(tokens_RN, parents_RN, depths_RN, zeros_RN, zeros_RN.float(), depths_RN >= 0)


@settings(max_examples=100, deadline=None)
@given(configs, seeds)
def test_walk_equals_plain_python(config: TreeConfig, seed: int) -> None:
    tree, _ = draft(config, seed, True, [0, 1])
    chosen_RN = torch.randint(VOCAB, tree.tokens_RN.shape, generator=torch.Generator().manual_seed(seed))
    verdict = walk(tree, lambda node_R, active_R: chosen_RN.gather(1, node_R[:, None])[:, 0])
    assert verdict.path_RD.shape[1] == int(verdict.num_emitted_R.max())
    for r in range(2):
        lists = (tree.parents_RN[r].tolist(), tree.tokens_RN[r].tolist(), chosen_RN[r].tolist())
        path, tokens = reference.accepted_path(*lists)
        padding = [-1] * (verdict.path_RD.shape[1] - len(path))
        assert verdict.num_emitted_R[r] == len(path)
        assert verdict.path_RD[r].tolist() == path + padding
        assert verdict.tokens_RD[r].tolist() == tokens + padding


def test_child_with() -> None:
    tree = tree_of(torch.tensor([[-1, 0, 0, 1, -1]] * 5), torch.tensor([[7, 1, 2, 2, 0]] * 5))
    nodes_R, tokens_R = torch.tensor([0, 1, 0, 2, -1]), torch.tensor([2, 2, 7, 2, 0])
    assert child_with(tree, nodes_R, tokens_R).tolist() == [2, 3, -1, -1, -1]
