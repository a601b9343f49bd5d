"""The products of a cycle are all found, and can be computed alone."""

from __future__ import annotations

from collections import Counter

import torch

from secondguess import TreeConfig
from secondguess.bench.products import Alone, Attention, Product, recorded
from secondguess.drafter.native import native_block
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.kernels.structs import PRODUCTS
from secondguess.target.base import causal_rows
from secondguess.target.linear import pack_linears
from secondguess.testing import tiny_drafter, tiny_target


def test_products_of_a_pass_and_of_a_draft() -> None:
    target = tiny_target("llama", dtype=torch.float32, hidden_size=64)
    rows, cache = causal_rows(torch.tensor([0]), torch.arange(1, 6)[None]), target.new_cache(1, 16)
    expected = target.forward(rows, cache).logits_RNV
    with recorded() as found:
        again = target.forward(rows, cache).logits_RNV
    assert torch.equal(again, expected)
    weighted, attentions = apart(found)
    assert Counter(p.num_rows for p in weighted) == {5: len(PRODUCTS) * target.spec.num_layers + 1}  # and the head's
    assert weighted[-1].num_inputs == target.spec.hidden_size
    assert [(a.num_requests, a.num_rows, a.width) for a in attentions] == [(1, 5, 5)] * target.spec.num_layers

    drafter, taps_1LH = tiny_drafter(target), torch.randn(1, 3, target.spec.hidden_size)
    drafter.native = native_block(drafter, "float32")
    pack_linears(drafter)
    tree = TreeConfig(budget=8, num_steps=3, grow_width=2, offer_width=2, num_reconsider=1)
    heard, alone = (EagleSpeculator(drafter, tree, num_slots=1, num_columns=32) for _ in range(2))
    accepted, roots = Accepted(0, torch.tensor([5]), taps_1LH), Roots((0,), (5,), ([3, 5],), (GREEDY,))
    for speculator in (heard, alone):
        speculator.accept([accepted])
    with recorded() as found:
        drafted = heard.draft(roots)
    again = alone.draft(roots)
    assert torch.equal(drafted.tokens_RN, again.tokens_RN), "who listens changes nothing"
    assert torch.equal(drafted.scores_RN, again.scores_RN)
    # fuse, the layer's and the head's at the root; then twice two nodes and a second look.
    weighted, attentions = apart(found)
    assert Counter(p.num_rows for p in weighted) == {1: len(PRODUCTS) + 2, 3: 2 * (len(PRODUCTS) + 1)}
    # The newest pair, which is the root; then the root and all rows of the round so far.
    assert [(a.num_rows, a.width) for a in attentions] == [(1, 1), (3, 4), (3, 7)]
    products = Alone(found)
    assert products.seconds() > 0
    assert products.attention_seconds() > 0
    for attention, (q, k, v) in zip(attentions, products.attentions, strict=True):
        assert torch.bmm(torch.bmm(q, k), v).shape == (attention.sizes["G"], q.shape[1], attention.sizes["D"])


def apart(found: list[Product | Attention]) -> tuple[list[Product], list[Attention]]:
    return [p for p in found if isinstance(p, Product)], [p for p in found if isinstance(p, Attention)]
