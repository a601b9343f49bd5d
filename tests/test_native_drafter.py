"""The drafter's compiled block: what its PyTorch form gives, with rows whose bits do not depend on others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from secondguess.config import TreeConfig
from secondguess.drafter.fit import final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise
from secondguess.drafter.native import NativeBlock, native_block
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.target.linear import pack_linears
from secondguess.testing import tiny_drafter, tiny_target

PROMPTS = [[5, 9, 2, 7, 1], [3, 3, 8]]


def speculator(target, drafter: Drafter, m: int) -> EagleSpeculator:
    tree = TreeConfig(budget=20, num_steps=4, grow_width=3, offer_width=3, num_reconsider=m)
    return EagleSpeculator(drafter, tree, num_slots=2, num_columns=64)


def features(s: EagleSpeculator, target, prompts) -> list[torch.Tensor]:
    """Of every forward of a draft."""
    generator = torch.Generator().manual_seed(0)
    for slot, prompt in enumerate(prompts):
        taps = torch.randn(len(prompt), 3, target.spec.hidden_size, generator=generator)
        s.accept([Accepted(slot, torch.tensor([*prompt[1:], 6]), taps)])
    found, run = [], s.run

    def spy(rows, e_RXH, g_RXH):
        found.append(run(rows, e_RXH, g_RXH))
        return found[-1]

    s.run = spy  # type: ignore[method-assign]
    count = len(prompts)
    s.draft(Roots(tuple(range(count)), (6,) * count, tuple([*p, 6] for p in prompts), (GREEDY,) * count))
    return found


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", dtype=torch.float32, hidden_size=64)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_it_computes_what_pytorch_computes(target, num_layers: int) -> None:
    base = tiny_drafter(target)
    config = replace(base.config, num_layers=num_layers)
    drafter = Drafter(config, target.embedding, base.target_ids)
    initialise(drafter, head_rows(target.head_weight, base.target_ids), final_norm_gain(target.model), 0)
    m = 3 if num_layers == 1 else 0
    slow = features(speculator(target, drafter, m), target, PROMPTS)
    drafter.native = native_block(drafter, "float32")
    assert isinstance(drafter.native, NativeBlock)
    fast = features(speculator(target, drafter, m), target, PROMPTS)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_level_0_has_the_same_bits_with_and_without_second_looks_and_alone(target) -> None:
    drafter = tiny_drafter(target)
    drafter.native = native_block(drafter, "bfloat16")
    pack_linears(drafter, "bfloat16")  # PyTorch's own products round differently for another number of rows
    without, beside = (features(speculator(target, drafter, m), target, PROMPTS) for m in (0, 3))
    alone = features(speculator(target, drafter, 3), target, PROMPTS[:1])
    assert torch.equal(without[1][:, :3], beside[1][:, :3])
    for both, one in zip(beside[1:], alone[1:], strict=True):
        assert torch.equal(both[:1], one)


def test_sizes_that_fill_no_vector_run_in_pytorch() -> None:
    target = tiny_target("llama", dtype=torch.float32, hidden_size=40)
    assert native_block(tiny_drafter(target), "float32") is None
