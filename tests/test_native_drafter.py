"""The drafter's compiled block: what its PyTorch form gives, with rows whose bits do not depend on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from secondguess.config import Reconsider, TreeConfig
from secondguess.drafter.fit import final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise
from secondguess.drafter.native import NativeRound, native_block
from secondguess.drafter.passes import Round
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Draw, Roots
from secondguess.target.linear import pack_linears
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree.rows import Offers

PROMPTS = [[5, 9, 2, 7, 1], [3, 3, 8]]


def speculator(target, drafter: Drafter, m: int, **settings: Any) -> EagleSpeculator:
    tree = TreeConfig(budget=20, num_steps=4, grow_width=3, offer_width=3, num_reconsider=m, **settings)
    return EagleSpeculator(drafter, tree, num_slots=2, num_columns=64)


def forwards(s: EagleSpeculator, target, prompts, draw: Draw = GREEDY) -> list[tuple[torch.Tensor, Offers]]:
    """Of every forward of a draft: the features, which then are the round's, and what they offer."""
    generator = torch.Generator().manual_seed(0)
    for slot, prompt in enumerate(prompts):
        taps = torch.randn(len(prompt), 3, target.spec.hidden_size, generator=generator)
        s.accept([Accepted(slot, torch.tensor([*prompt[1:], 6]), taps)])
    found, grow = [], s.grow_tree

    def spying(config, root, forward, guide):
        round_ = forward.__self__

        def spy(rows):
            offers, end = forward(rows), rows.visible_RXY.shape[2]
            found.append((round_.features_RYH[:, end - rows.tokens_RX.shape[1] : end].clone(), offers))
            return offers

        found.append((round_.features_RYH[:, :1].clone(), root.offers))
        return grow(config, root, spy, guide)

    s.grow_tree = spying
    count = len(prompts)
    s.draft(Roots(tuple(range(count)), (6,) * count, tuple([*p, 6] for p in prompts), (draw,) * count))
    return found


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", dtype=torch.float32, hidden_size=64)


LOOKS = [
    Reconsider(),
    Reconsider(query_slot="own_token", child_feature="level0"),
    Reconsider(query_rope="next", see_own_level0=False),
]


@pytest.mark.parametrize("draw", [GREEDY, Draw(1.0, 3)])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("changed", [{}, {"num_layers": 2}, {"lens": True}, {"norm_output": False}])
def test_it_computes_what_pytorch_computes(target, changed: dict[str, Any], look: Reconsider, draw: Draw) -> None:
    base = tiny_drafter(target)
    drafter = Drafter(replace(base.config, **changed), target.embedding, base.target_ids)
    initialise(drafter, head_rows(target.head_weight, base.target_ids), final_norm_gain(target.model), 0)
    if "lens" in changed:
        torch.nn.init.normal_(drafter.lens.weight, std=0.3)
    slow = forwards(speculator(target, drafter, 3, reconsider=look, coupled=not draw.greedy), target, PROMPTS, draw)
    drafter.native = native_block(drafter, "float32")
    native = speculator(target, drafter, 3, reconsider=look, coupled=not draw.greedy)
    assert native.new_round is NativeRound
    fast = forwards(native, target, PROMPTS, draw)
    assert len(slow) == len(fast) == 4
    for (f, offers), (f_slow, slow_offers) in zip(fast, slow, strict=True):
        torch.testing.assert_close(f, f_slow, rtol=0, atol=1e-4)
        torch.testing.assert_close(offers.logps_RXK, slow_offers.logps_RXK, rtol=0, atol=1e-4)
        torch.testing.assert_close(offers.confidence_RX, slow_offers.confidence_RX, rtol=0, atol=1e-4)
        assert torch.equal(offers.tokens_RXK, slow_offers.tokens_RXK)


def test_level_0_has_the_same_bits_with_and_without_second_looks_and_alone(target) -> None:
    drafter = tiny_drafter(target)
    drafter.native = native_block(drafter, "bfloat16")
    pack_linears(drafter, "bfloat16")  # PyTorch's own products round differently for another number of rows
    without, beside = (forwards(speculator(target, drafter, m), target, PROMPTS) for m in (0, 3))
    alone = forwards(speculator(target, drafter, 3), target, PROMPTS[:1])
    assert torch.equal(without[1][0][:, :3], beside[1][0][:, :3])
    assert torch.equal(without[1][1].logps_RXK, beside[1][1].logps_RXK[:, :3])
    for (both, offers), (one, its_offers) in zip(beside[1:], alone[1:], strict=True):
        assert torch.equal(both[:1], one)
        assert torch.equal(offers.logps_RXK[:1], its_offers.logps_RXK)


@pytest.mark.parametrize(
    "look", [Reconsider(merge="union"), Reconsider(select="entropy"), Reconsider(query_slot="soft_pred")]
)
def test_other_looks_are_taken_in_pytorch(target, look: Reconsider) -> None:
    drafter = tiny_drafter(target)
    drafter.native = native_block(drafter, "float32")
    assert speculator(target, drafter, 3, reconsider=look).new_round is Round


def test_sizes_that_fill_no_vector_run_in_pytorch() -> None:
    target = tiny_target("llama", dtype=torch.float32, hidden_size=40)
    assert native_block(tiny_drafter(target), "float32") is None
