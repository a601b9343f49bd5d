"""Compiled layers: what the lean forward gives, and the same bits for a row in any batch, tree and column."""

from __future__ import annotations

import pytest
import torch

from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.drafter.checkpoint import save_drafter
from secondguess.engine.slots import SlotCache
from secondguess.target import hf, lean
from secondguess.target.base import causal_rows
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.target.native import NativeDecoder
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import Rows, TargetOut
from tiny_folder import save_tiny

FORMS = ("float32", "bfloat16", "int8", "int4")
FIELDS = ("hidden_RNH", "taps_RNLH", "logits_RNV")


def make(family: str, form: str = "float32", tie: bool = True) -> HFTarget:
    """Heads of 16 numbers, which fill a vector."""
    return tiny_target(family, dtype=torch.float32, hidden_size=64, tie=tie, form=form)


def tokens(count: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 63 + 1 for i in range(count)]


def feed(target: HFTarget, cache: SlotCache, slot: int, ids: list[int], start: int = 0) -> TargetOut:
    """``ids`` in the columns and at the positions from ``start`` on."""
    columns_RN = torch.arange(start, start + len(ids))[None]
    seen_W = torch.arange(start + len(ids))
    rows = Rows(
        slots_R=torch.tensor([slot]),
        tokens_RN=torch.tensor([ids]),
        positions_RN=columns_RN,
        columns_RN=columns_RN,
        visible_RNW=seen_W <= columns_RN[..., None],
        column_positions_RW=seen_W[None],
    )
    return target.forward(rows, cache)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", lean.FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_it_computes_what_the_lean_forward_computes(family: str, form: str, tie: bool, monkeypatch) -> None:
    fast = make(family, form, tie)
    assert isinstance(fast._body.decoder, NativeDecoder)
    monkeypatch.setattr(hf, "compiles", lambda model: False)
    slow = make(family, form, tie)
    assert isinstance(slow._body.decoder, lean.LeanDecoder)
    ids_RN = torch.tensor([tokens(30), tokens(60)[30:]])
    outs = [t.forward(causal_rows(torch.tensor([2, 0]), ids_RN), t.new_cache(3, 40)) for t in (fast, slow)]
    for name in FIELDS:
        ours, theirs = (getattr(out, name) for out in outs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", lean.FAMILIES)
def test_a_row_has_the_same_bits_alone_and_in_a_prompt(family: str, form: str) -> None:
    target, ids = make(family, form), tokens(70)
    whole, steps = target.new_cache(1, 80), target.new_cache(3, 90)
    out = feed(target, whole, 0, ids)
    feed(target, steps, 1, ids[:20])
    for i in range(20, 70):
        one = feed(target, steps, 1, ids[i : i + 1], i)
        for name in FIELDS:
            assert torch.equal(getattr(one, name)[0, 0], getattr(out, name)[0, i]), (name, i)


def test_a_tree_s_node_has_the_bits_of_plain_decoding() -> None:
    """Two requests; nodes lie in other columns than plain decoding would use, among nodes that they do not see."""
    target = make("qwen2")  # with windows of 8 positions in half of its layers
    ids, branch = tokens(25), [11, 12, 13]
    plain, cache = target.new_cache(1, 60), target.new_cache(2, 60)
    feed(target, plain, 0, ids)
    expected = feed(target, plain, 0, branch, 25)
    feed(target, cache, 0, tokens(9))
    feed(target, cache, 1, ids)
    # Nodes: 0 root 11; 1 and 2 its children 40 and 12; 3 child of 1; 4 child of 2: 13. Other things in request 0.
    sees = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    depth, start = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([9, 25])
    columns_W = torch.arange(30)
    prefix_RNW = (columns_W < start[:, None])[:, None].expand(-1, 5, -1)
    tree_RNW = torch.stack([torch.nn.functional.pad(sees, (int(s), 25 - int(s))) for s in start])
    positions_RW = columns_W.expand(2, -1).clone()
    for r, s in enumerate(start.tolist()):
        positions_RW[r, s : s + 5] = s + depth
    rows = Rows(
        slots_R=torch.tensor([0, 1]),
        tokens_RN=torch.tensor([[1, 2, 3, 4, 5], [11, 40, 12, 41, 13]]),
        positions_RN=start[:, None] + depth,
        columns_RN=start[:, None] + torch.arange(5),
        visible_RNW=prefix_RNW | tree_RNW,
        column_positions_RW=positions_RW,
    )
    out = target.forward(rows, cache)
    for name in FIELDS:
        assert torch.equal(getattr(out, name)[1, [0, 2, 4]], getattr(expected, name)[0]), name


def test_passes_work_in_the_same_memory() -> None:
    target, ids = make("llama"), tokens(40)
    cache, decoder = target.new_cache(1, 64), target._body.decoder
    assert isinstance(decoder, NativeDecoder)
    feed(target, cache, 0, ids)
    held = decoder.workspace.held.data_ptr()
    for i in range(5):
        feed(target, cache, 0, ids[i : i + 1], 40 + i)
    assert decoder.workspace.held.data_ptr() == held


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["pr", "ngram", "pr:coupled=true"])
def test_texts_are_plain_decoding_s_in_every_form(form: str, method: str, tmp_path) -> None:
    target = make("llama", form)
    save_drafter(tiny_drafter(target), tmp_path / "drafter", {"target": "tiny"}, torch.float32)
    tree = TreeConfig(budget=70, num_steps=5, grow_width=5, offer_width=5)  # wider than the stable attention takes
    prompts = [tokens(5 + i)[i:] for i in range(6)]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True) for i, t in enumerate((0, 1) * 3)]
    plain = LLM(target, method="ar", max_batch_size=1, max_model_len=64)
    drafter = None if method == "ngram" else tmp_path / "drafter"
    fast = LLM(target, drafter, method=method, tree=tree, max_batch_size=4, max_model_len=64)
    expected = [o.token_ids for o in plain.generate(prompts, params)]
    assert [o.token_ids for o in fast.generate(prompts, params)] == expected


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_of_loaded_targets_whose_layers_are_not_compiled(family: str, dtype: str, tmp_path) -> None:
    target = load_target(str(save_tiny(tmp_path, family=family) / "target"), dtype)
    assert (target.spec.mode, target.spec.dtype) == (dtype, torch.float32)
    prompts = [tokens(5 + i)[i:] for i in range(6)]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=30, ignore_eos=True) for i, t in enumerate((0, 1) * 3)]
    plain = LLM(target, method="ar", max_batch_size=1, max_model_len=64)
    fast = LLM(target, tmp_path / "drafters" / "pr", max_batch_size=4, max_model_len=64)
    expected = [o.token_ids for o in plain.generate(prompts, params)]
    assert [o.token_ids for o in fast.generate(prompts, params)] == expected


def test_which_models_are_compiled() -> None:
    assert isinstance(make("llama")._body.decoder, NativeDecoder)
    for other in (
        tiny_target("llama", dtype=torch.float64, hidden_size=64),
        tiny_target("llama", dtype=torch.float32, hidden_size=40),  # heads of 10 numbers
    ):
        assert isinstance(other._body.decoder, lean.LeanDecoder)
