"""Checkpoints of other trainers and for other engines: what is read and written computes what the formats say."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foreign_drafter import FLAGS, reference, write_foreign
from secondguess.cli import main
from secondguess.config import CHAIN, TreeConfig
from secondguess.drafter.card import PLACES
from secondguess.drafter.checkpoint import load_for, open_checkpoint, save_drafter
from secondguess.drafter.checks import examine
from secondguess.drafter.export import export, write_card
from secondguess.drafter.foreign import parse_given, read_foreign
from secondguess.drafter.foreign_tensors import Source, read_map
from secondguess.drafter.model import Drafter
from secondguess.drafter.rope import rope_rates
from secondguess.drafter.settings import read_settings
from secondguess.drafter.shipped import SHIPPED, find_alone
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.drafter.speculators_form import flattened, nested
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.target import hf
from secondguess.target.base import causal_rows
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.config import idle, load_config
from secondguess.tree.rows import DraftRows
from secondguess.types import SamplingParams
from tiny_folder import save_tiny

EAGLE3 = dict.fromkeys(FLAGS, False)
EAGLE31 = EAGLE3 | {"fc_norm": True, "norm_output": True}
# No norm of the target's states, one for each, or one for all; the other two flags as they come.
COMBINATIONS = [
    {"fc_norm": norm == 1, "norm_before_fc": norm == 2, "norm_before_residual": residual, "norm_output": output}
    for norm, residual, output in itertools.product(range(3), (False, True), (False, True))
]
FORMS = ("eagle3", "speculators")


TARGET = tiny_target("llama")


@pytest.fixture(scope="module")
def target():
    return TARGET


def read(folder: Path, target, *given: str):
    return read_foreign(Source(folder, target, parse_given(given)))


def imported(folder: Path, target, *given: str) -> Path:
    """The folder that importing ``folder`` gives."""
    done = read(folder, target, *given)
    out = folder.with_name("imported")
    save_drafter(done.drafter, out, {"target": "tiny"}, done.dtype)
    return out


def files(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def change(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """Change a checkpoint; None takes something out, ``__`` stands for a dot."""
    written, found = files(folder)
    written |= config or {}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    found |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({k: v.contiguous() for k, v in found.items() if v is not None}, folder / "model.safetensors")
    return folder


def serve(drafter: Drafter, taps_TLH: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits of the last row that the target feeds and of one row more, as the engine computes them."""
    tree = TreeConfig(num_steps=2, num_reconsider=0)
    s = EagleSpeculator(drafter.requires_grad_(False), tree, num_slots=1, num_columns=32)
    served, offers = [], s.offers

    def spy(f_RXH: torch.Tensor, *more: Any) -> Any:
        served.append(drafter.logits(f_RXH)[0, 0])
        return offers(f_RXH, *more)

    s.offers = spy  # type: ignore[method-assign]
    s.accept([Accepted(0, torch.tensor(tokens[:-1]), taps_TLH)])
    _, round_ = s.begin(Roots((0,), (tokens[-2],), (tokens[:-1],), (GREEDY,)))
    one = torch.ones(1, 1, dtype=torch.bool)
    round_.forward(
        DraftRows(
            tokens_RX=torch.tensor([tokens[-1:]]),
            feature_rows_RX=torch.zeros(1, 1, dtype=torch.int64),
            depths_RX=torch.ones(1, 1, dtype=torch.int64),
            visible_RXY=torch.ones(1, 1, 2, dtype=torch.bool),
            valid_RX=one,
            num_level0=1,
        )
    )
    return torch.stack(served)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: "+".join(k for k, v in flags.items() if v) or "none")
@pytest.mark.parametrize(("own", "hidden"), [(False, 32), (True, 32), (True, 40)])
def test_parity_with_the_formats_both_ways(tmp_path, target, form, flags, own: bool, hidden: int) -> None:
    source = write_foreign(tmp_path / "theirs", form, flags, own, hidden)
    generator = torch.Generator().manual_seed(1)
    taps_TLH = torch.randn(5, 3, 32, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 3.0, 9.0])[:, None]
    tokens = [7, 3, 60, 3, 11, 22]
    wanted = reference(*files(source), target.embedding, taps_TLH, tokens)[-2:]
    ours = imported(source, target)
    drafter = load_for(ours, target)
    assert (serve(drafter, taps_TLH, tokens) - wanted).abs().max() < 1e-10
    for out in FORMS:
        export(ours, out, tmp_path / out, "someone/target", None)
        again = reference(*files(tmp_path / out), target.embedding, taps_TLH, tokens)[-2:]
        assert torch.equal(again, wanted)
        assert read(without_block(tmp_path / out), target).drafter.config == drafter.config


def without_block(folder: Path) -> Path:
    """As if another trainer had written it."""
    return change(folder, {"secondguess": None})


def test_tensors_and_settings_survive_a_round_trip_bit_for_bit(tmp_path, target) -> None:
    made = tmp_path / "made"
    drafter = tiny_drafter(target)
    save_drafter(drafter, made, {"target": "tiny", "method": "pr"}, torch.bfloat16)
    first = load_for(made, target)
    for form in FORMS:
        export(made, form, tmp_path / form, None, 4096)
        again = load_for(tmp_path / form, target)
        assert again.config.max_position_embeddings == 4096
        assert torch.equal(again.target_ids, first.target_ids)
        parameters = dict(again.named_parameters())
        assert "self_query" in parameters
        for name, parameter in first.named_parameters():
            assert torch.equal(parameters[name], parameter), name
        export(tmp_path / form, "eagle3", tmp_path / f"{form}-again", None, None)
        written, known = files(tmp_path / f"{form}-again"), files(made)
        assert written[1].keys() == known[1].keys()
        assert all(torch.equal(tensor, known[1][name]) for name, tensor in written[1].items())


def test_linear_and_llama3_rates_are_transformers(target) -> None:
    shape = tiny_drafter(target).config
    for scaling in (
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ):  # fmt: skip
        config = LlamaConfig(head_dim=64, rope_parameters={**scaling, "rope_theta": 500.0})
        theirs, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, torch.device("cpu"))
        ours = rope_rates(replace(shape, head_dim=64, rope_theta=500.0, rope_scaling=scaling))
        assert factor == 1.0
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)
        plain = rope_rates(replace(shape, head_dim=64, rope_theta=500.0))
        assert (ours < plain).any()


# -- names -------------------------------------------------------------------------------------------------------------

LAYER_TENSORS = {
    "hidden_norm.weight", "input_layernorm.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight",
    "mlp.up_proj.weight", "post_attention_layernorm.weight", "self_attn.k_proj.weight", "self_attn.o_proj.weight",
    "self_attn.q_proj.weight", "self_attn.v_proj.weight",
}  # fmt: skip
LAYER_SETTINGS = {
    "attention_bias", "dtype", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta", "tie_word_embeddings", "vocab_size",
}  # fmt: skip


def test_names_of_an_exported_pr_drafter(tmp_path, target) -> None:
    """vLLM stops at any tensor it does not know, in ``model.safetensors`` or in a second file beside it."""
    save_drafter(tiny_drafter(target), tmp_path / "made", {})
    rest = {"d2t", "t2d", "fc.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "lm_head.weight",
            "norm.weight"}  # fmt: skip
    own = {"architectures", "draft_vocab_size", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output",
           "secondguess", "target_hidden_size", "tie_word_embeddings"}  # fmt: skip
    for form, layer in (("eagle3", "midlayer."), ("speculators", "layers.0.")):
        out = tmp_path / form
        export(tmp_path / "made", form, out, "someone/target", None)
        found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        assert found == {"README.md", "config.json", "model.safetensors", "reconsider/query.safetensors"}
        config, tensors = files(out)
        assert tensors.keys() == rest | {layer + name for name in LAYER_TENSORS}
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        if form == "eagle3":
            assert config.keys() == own | LAYER_SETTINGS - {"attention_bias", "mlp_bias"}
            assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        else:
            theirs = {"speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad",
                      "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"}  # fmt: skip
            assert config.keys() == own | theirs
            assert config["transformer_layer_config"].keys() == LAYER_SETTINGS
            assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
            assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == CHAIN


def test_a_nested_config_flattens_to_what_it_was() -> None:
    flat, _ = files(SHIPPED / "smollm2-135m" / "pr")
    back = flattened(nested(flat, "v", ["A"], 3))
    assert {key: back[key] for key in flat} == flat
    assert flattened(flat) == flat


def test_a_shipped_drafter_is_found_and_exported(tmp_path) -> None:
    source = find_alone("smollm2-135m/eagle3.1")
    assert source == find_alone("eagle3.1") == SHIPPED / "smollm2-135m" / "eagle3.1"
    assert not export(source, "eagle3", tmp_path / "out", None, None)  # all is known that its user should know
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --speculative-config" in card
    assert f'"num_speculative_tokens": {CHAIN}' in card
    assert "secondguess serve smollm2-135m --drafter out" in card
    assert read_settings(tmp_path / "out")[0] == read_settings(source)[0]
    before, after = files(source)[1], files(tmp_path / "out")[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    with pytest.raises(UserError, match=r"those that ship are smollm2-135m/eagle3\.1, smollm2-135m/pr"):
        find_alone("pr2")


@pytest.mark.parametrize(("name", "fine"), [("a/b", True), ("tiny", False), ("./a/b", False), ("/a/b", False)])
def test_a_name_that_others_do_not_know_is_remarked_on(tmp_path, target, name: str, fine: bool) -> None:
    save_drafter(tiny_drafter(target), tmp_path / "made", {"target": name})
    said = export(tmp_path / "made", "eagle3", tmp_path / "out", None, None)
    unknown = f"{name!r} is no name under which others find the target: --base-model NAME sets its hub id"
    assert said == ([] if fine else [unknown])
    assert not export(tmp_path / "made", "eagle3", tmp_path / "again", "a/b", None)


def test_a_drafter_that_sglang_would_misread_is_not_recommended_to_it(tmp_path, target) -> None:
    save_drafter(tiny_drafter(target, num_layers=2), tmp_path / "two", {})
    export(tmp_path / "two", "eagle3", tmp_path / "two-out", "a/b", None)
    flags = EAGLE3 | {"norm_before_residual": True, "norm_before_fc": True}
    theirs = imported(write_foreign(tmp_path / "theirs", "eagle3", flags), target)
    export(theirs, "eagle3", tmp_path / "one-out", "a/b", None)
    two, one = ((tmp_path / f"{name}-out" / "README.md").read_text() for name in ("two", "one"))
    assert "Two layers of width 32" in two
    assert "SGLang is not known to read more than the first of 2 layers." in two
    assert "One layer of width 32" in one
    assert "SGLang is not known to read `norm_before_residual` and `norm_before_fc`." in one
    for card in (two, one):
        assert "sglang.launch_server" not in card
        assert "vllm serve a/b" in card


# -- layers ------------------------------------------------------------------------------------------------------------

TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("form", "ids", "given", "taps"),
    [
        ("eagle3", None, [], None),
        ("eagle3", [2, 4, 5], [], None),  # EAGLE-3's as inputs
        ("eagle3", [1, 3, 4], [], None),  # EAGLE-3's as outputs
        ("eagle3", [1, 2, 6], ["layer_ids=inputs"], (1, 2, 6)),
        ("eagle3", [1, 2, 6], ["layer_ids=outputs"], (2, 3, 7)),
        ("eagle3", [2, 4, 5], ["layer_ids=outputs"], (3, 5, 6)),
        ("eagle3", [2, 4, 5, 8], [], None),  # with the last state, which is no input
        ("eagle3", None, ["layer_ids=3,5,6"], (3, 5, 6)),
        ("speculators", [1, 2, 6], ["layer_ids=2,4,5"], None),
        ("speculators", [1, 2, 6], [], (1, 2, 6)),
        ("speculators", [1, 3, 4], [], (1, 3, 4)),
        ("speculators", [2, 4, 5], [], None),
    ],
)
def test_layer_numbers_mean_what_their_tool_means(tmp_path, target, form, ids, given, taps) -> None:
    source = change(write_foreign(tmp_path / "theirs", form, EAGLE31), {TAPS: ids})
    drafter = read(source, target, *given).drafter
    assert drafter.config.tap_layers == taps


def test_layer_numbers_in_the_eagle_config_count_too(tmp_path, target) -> None:
    source = change(write_foreign(tmp_path / "theirs", "eagle3", EAGLE31), {"eagle_config": {TAPS: [1, 3, 6]}})
    with pytest.raises(UserError, match="layer_ids=inputs or =outputs"):
        read(source, target)
    ours = imported(source, target, "layer_ids=outputs")
    assert read_settings(ours)[0].tap_layers == (2, 4, 7)
    export(ours, "eagle3", tmp_path / "out", None, None)
    assert files(tmp_path / "out")[0]["eagle_config"][TAPS] == [2, 4, 7]
    assert read_settings(tmp_path / "out")[0].tap_layers == (2, 4, 7)
    assert "SGLang counts outputs" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("lean", [True, False])
def test_a_target_taps_what_drafters_ask_for(tmp_path, lean: bool, monkeypatch) -> None:
    """Two drafters with different layers over one target: each gets its own states, the text is plain decoding's."""
    if not lean:
        monkeypatch.setattr(hf, "fits", lambda model: False)
    target = tiny_target("llama")
    source = change(write_foreign(tmp_path / "theirs", "speculators", EAGLE31), {TAPS: [1, 2, 6]})
    ours, usual = imported(source, target), tmp_path / "usual"
    save_drafter(tiny_drafter(target), usual, {})
    first = LLM(target, usual, method="pr", max_batch_size=1, max_model_len=64)
    other = LLM(target, ours, method="eagle3.1", max_batch_size=1, max_model_len=64)
    assert target.spec.tap_layers == (2, 4, 5, 1, 6)
    assert load_for(ours, target).tap_index == (3, 0, 4)
    ids_RN = torch.tensor([[5, 9, 2, 7, 11]])
    out = target.forward(causal_rows(torch.tensor([0]), ids_RN), target.new_cache(1, 8))
    states = every_input(target, ids_RN)
    for place, layer in enumerate(target.spec.tap_layers):
        torch.testing.assert_close(out.taps_RNLH[:, :, place], states[layer], rtol=0, atol=1e-11)
    plain = LLM(target, method="ar", max_batch_size=1, max_model_len=64)
    for llm in (first, other):
        (wanted,), (got,) = (one.generate([[5, 9, 2, 7]], SamplingParams(max_tokens=24)) for one in (plain, llm))
        assert got.token_ids == wanted.token_ids


def every_input(target, ids_RN: torch.Tensor) -> list[torch.Tensor]:
    """Inputs of all layers, by transformers."""
    config = copy.deepcopy(target.model.config)  # which keeps the name of the attention
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        return list(model.eval()(ids_RN, output_hidden_states=True).hidden_states)


# -- vocabulary, embedding, head ---------------------------------------------------------------------------------------


def offers(drafter: Drafter) -> dict[int, torch.Tensor]:
    """The head's row of each target token."""
    return dict(zip(drafter.target_ids.tolist(), drafter.lm_head.weight.detach(), strict=True))


def assert_same_offers(ours: Drafter, theirs: Drafter) -> None:
    assert ours.target_ids.tolist() == sorted(ours.target_ids.tolist())
    a, b = offers(ours), offers(theirs)
    assert a.keys() == b.keys()
    assert all(torch.equal(row, b[token]) for token, row in a.items())


def test_a_map_in_any_order_is_put_in_order_with_its_head(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
    sorted_ = read(source, target).drafter
    _, tensors = files(source)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    ids = (tensors["d2t"] + torch.arange(32))[order]
    change(source, d2t=ids - torch.arange(32), lm_head__weight=tensors["lm_head.weight"][order])
    assert_same_offers(read(source, target).drafter, sorted_)
    change(source, t2d=None)
    assert_same_offers(read(source, target).drafter, sorted_)


@given(st.lists(st.integers(0, 63), min_size=1, unique=True))
def test_a_map_is_read_whatever_its_order_and_its_kind(ids: list[int]) -> None:
    source = Source(Path("theirs"), TARGET, {})
    config = {"draft_vocab_size": len(ids), "vocab_size": 64}
    wanted, t2d = torch.tensor(ids), torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
    assert torch.equal(read_map(source, wanted - torch.arange(len(ids)), t2d, config), wanted)
    assert not source.remarks
    assert torch.equal(read_map(source, wanted, t2d, config), wanted)
    assert len(source.remarks) == (len(ids) > 1)  # the one id of a map of one is its offset, too


def test_ids_in_place_of_offsets_are_noticed(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
    offsets = read(source, target).drafter
    change(source, d2t=files(source)[1]["d2t"] + torch.arange(32))
    told = Source(source, target, {})
    assert_same_offers(read_foreign(told).drafter, offsets)
    assert "d2t held token ids" in told.remarks[-1]
    change(source, t2d=None)
    with pytest.raises(UserError, match="rises at every step"):
        read(source, target)


def test_a_full_vocabulary_needs_no_map(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31, draft=64)
    change(source, {"draft_vocab_size": None}, d2t=None, t2d=None)
    assert read(source, target).drafter.target_ids.tolist() == list(range(64))


def test_an_embedding_that_is_the_targets_or_unwanted_is_not_kept(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31, own=True)
    kept = read(source, target).drafter
    assert kept.config.own_embedding
    assert not read(source, target, "own_embedding=false").drafter.config.own_embedding
    findings = {f.name: f for f in examine_imported(source, target)}
    assert findings["embeddings"].verdict == "warning"
    told = Source(change(source, embed_tokens__weight=target.embedding.bfloat16()), target, {})
    assert not read_foreign(told).drafter.config.own_embedding
    assert "the target's" in told.remarks[-1]


def examine_imported(source: Path, target) -> list:
    out = imported(source, target)
    return examine(open_checkpoint(out, target), target.facts, target.embedding)


def test_a_drafter_without_a_head_gets_the_targets(tmp_path, target) -> None:
    source = change(write_foreign(tmp_path / "theirs", "eagle3", EAGLE31), lm_head__weight=None)
    drafter = read(source, target).drafter
    torch.testing.assert_close(drafter.lm_head.weight, target.head_weight[drafter.target_ids].float(), rtol=0, atol=0)


def test_files_of_torch_are_read(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
    wanted = read(source, target).drafter
    torch.save(files(source)[1], source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    assert_same_offers(read(source, target).drafter, wanted)
    (source / "pytorch_model.bin").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a readable file of weights"):
        read(source, target)


def test_older_names_of_sglang_are_understood(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
    wanted, (_, tensors) = read(source, target).drafter, files(source)
    depths = enumerate(("low", "mid", "high"))
    moved = {f"aux_norm_{depth}__weight": tensors[f"fc_norm.{i}.weight"] for i, depth in depths}
    gone = dict.fromkeys((f"fc_norm__{i}__weight" for i in range(3)), None)
    change(source, {"fc_norm": None, "use_aux_norm": True}, **moved, **gone)
    ours = read(source, target).drafter
    assert ours.config == wanted.config
    name = "fc_norm.2.weight"
    assert torch.equal(ours.get_parameter(name), wanted.get_parameter(name))


def test_scaled_rope_is_kept(tmp_path, target) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
    change(source, {"rope_scaling": {"type": "linear", "factor": 4}})
    ours = imported(source, target)
    assert read_settings(ours)[0].rope_scaling == scaling
    export(ours, "speculators", tmp_path / "out", None, None)
    layer = files(tmp_path / "out")[0]["transformer_layer_config"]
    assert layer["rope_parameters"] == {**scaling, "rope_theta": 5000.0}
    assert read_settings(tmp_path / "out")[0].rope_scaling == scaling


def test_rope_that_is_said_twice_alike_is_fine(tmp_path, target) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
    change(source, {"rope_parameters": scaling | {"rope_theta": 5000.0}, "rope_scaling": scaling})
    assert read(source, target).drafter.config.rope_scaling == scaling


@pytest.mark.parametrize("form", FORMS)
def test_null_is_not_said(tmp_path, target, form) -> None:
    """Some tools write all keys that they know."""
    source = write_foreign(tmp_path / "theirs", form, EAGLE31)
    wanted = read(source, target).drafter.config
    written, _ = files(source)
    holder = written if form == "eagle3" else written["transformer_layer_config"]
    holder |= dict.fromkeys(("rope_scaling", "rope_parameters", "sliding_window", "quantization_config"))
    holder["eagle_config"] = dict.fromkeys((*FLAGS, "use_aux_hidden_state", TAPS))
    (source / "config.json").write_text(json.dumps(written))
    assert read(source, target).drafter.config == wanted


def test_what_an_import_cannot_know_is_said(tmp_path, target) -> None:
    source = change(write_foreign(tmp_path / "theirs", "eagle3", EAGLE31), {"rope_theta": None, "norm_output": None})
    told = Source(source, target, {})
    assert read_foreign(told).drafter.config.rope_theta == 10000.0
    assert "rope_theta is not said" in told.remarks[0]
    findings = {f.name: f.verdict for f in examine_imported(source, target)}
    assert (findings["norms"], findings["provenance"], findings["rope"]) == ("warning", "unknown", "ok")
    given = read(source, target, "rope_theta=123.5", "norm_output=true").drafter.config
    assert (given.rope_theta, given.norm_output) == (123.5, True)


# -- refusals ----------------------------------------------------------------------------------------------------------

NESTED = {"speculators_model_type": "peagle"}
ONE_PLAIN = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}


@pytest.mark.parametrize(
    ("form", "config", "tensors", "said"),
    [
        ("eagle3", {"fc_norm": None}, {}, "fc_norm is false, but there is fc_norm.0.weight.* --set fc_norm=true"),
        ("eagle3", {"norm_before_fc": True}, {}, "norm_before_fc is true, but input_norm.weight is missing"),
        ("eagle3", {"norm_output": "yes"}, {}, "norm_output must be true or false"),
        ("speculators", {"norm_before_residual": None}, {}, "--set norm_before_residual="),
        ("speculators", NESTED, {}, "of kind 'peagle'"),
        ("eagle3", {"secondguess": {"a": 1}}, {}, "needs no import"),
        ("eagle3", {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2"),
        ("eagle3", {"attention_bias": True}, {}, "attention_bias is True"),
        ("eagle3", {"sliding_window": 512}, {}, "sliding window of 512"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is False"),
        ("eagle3", {"quantization_config": {"bits": 4}}, {}, "quantization_config is"),
        ("eagle3", {"vocab_size": 65}, {}, "vocab_size is 65, the target's is 64"),
        ("eagle3", {"target_hidden_size": 64}, {}, "target_hidden_size is 64, the target's is 32"),
        ("eagle3", {"hidden_size": None}, {}, "lacks hidden_size"),
        ("eagle3", {"rope_parameters": {"rope_theta": 7.0}}, {}, "rope_theta is both 5000.0 and 7.0"),
        ("eagle3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {}, "are not supported"),
        ("eagle3", ONE_PLAIN, {}, "rope_parameters .* and rope_scaling .* differ"),
        ("eagle3", {TAPS: [1, 2, 6]}, {}, "layer_ids=inputs or =outputs"),
        ("eagle3", {TAPS: [2, 2, 5]}, {}, "must be different layers"),
        ("eagle3", {TAPS: [2, 4, 9]}, {}, "must be different layers"),
        ("speculators", {TAPS: [2, 4, 8]}, {}, "must be different layers of 0 to 7"),
        ("speculators", {TAPS: [2, 4]}, {}, "reads 3 states, but 2 layers are named"),
        ("eagle3", {}, {"d2t": None}, "d2t is missing, so it is not known which 32 of the 64"),
        ("eagle3", {}, {"d2t": torch.zeros(32)}, "must hold 32 whole numbers"),
        ("eagle3", {}, {"d2t": torch.zeros(32, dtype=torch.int64)}, "t2d and d2t disagree"),
        ("eagle3", {}, {"d2t": torch.full((32,), 60), "t2d": None}, "outside the vocabulary"),
        ("eagle3", {"tie_word_embeddings": True}, {"lm_head__weight": torch.ones(64, 32)}, "64 rows .*: tie_word"),
        ("eagle3", {}, {"midlayer__hidden_norm__weight": None}, "an EAGLE-1 or EAGLE-2 drafter"),
        ("eagle3", {}, {"midlayer__hidden_norm__weight": None, "fc__weight": None}, "no EAGLE-3 drafter"),
        ("eagle3", {}, {"layers__1__norm__weight": torch.ones(32)}, "unknown tensors: layers.1.norm.weight"),
        ("eagle3", {}, {"midlayer__self_attn__q_norm__weight": torch.ones(8)}, "q_norm"),
        ("eagle3", {}, {"embed_tokens__weight": torch.ones(3, 32)}, r"embed_tokens.weight is \(3, 32\)"),
        ("eagle3", {}, {"norm__weight": torch.full((32,), torch.inf)}, "not finite"),
    ],
)
def test_what_cannot_be_imported_is_refused(tmp_path, target, form, config, tensors, said) -> None:
    source = change(write_foreign(tmp_path / "theirs", form, EAGLE31), config, **tensors)
    with pytest.raises(UserError, match=said) as caught:
        read(source, target)
    assert "\n" not in str(caught.value)


def test_another_width_needs_an_embedding(tmp_path, target) -> None:
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31, own=True, hidden=40)
    assert read(source, target).drafter.embedding.shape == (64, 40)
    with pytest.raises(UserError, match="an embedding of its own"):
        read(source, target, "own_embedding=false")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("norm_outputs=true", "did you mean norm_output"),
        ("norm_output=1", "must be true or false"),
        ("rope_theta=high", "must be a number"),
        ("layer_ids=both", "inputs or outputs"),
        ("layer_ids=1,b", "or the layers themselves"),
    ],
)
def test_settings_by_hand_are_checked(given, said) -> None:
    with pytest.raises(UserError, match=said):
        parse_given([given])


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """``save_tiny``, and a drafter of another trainer in ``theirs``; the current folder."""
    monkeypatch.chdir(save_tiny(tmp_path))
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    write_foreign(tmp_path / "theirs", "eagle3", EAGLE3 | {"norm_before_residual": True}, vocab=257, draft=100)
    return tmp_path


def test_import_then_generate(here, capsys) -> None:
    command = ["import", "theirs", "ours", "--target", "target"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "norm_before_residual" in out
    assert "secondguess doctor target ours" in out
    block = json.loads(Path("ours/config.json").read_text())["secondguess"]
    assert block["imported"] == {"from": "theirs", "given": {}}
    flags = ["--method", "ar,eagle3.1", "--drafter", "ours", "--max-tokens", "8", "--json", "out.json"]
    assert main(["generate", "target", "ab", *flags]) == 0
    plain, fast = json.loads(Path("out.json").read_text())["results"]
    assert plain["token_ids"] == fast["token_ids"]
    assert main(command) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err


def test_a_failed_import_leaves_nothing(here, capsys) -> None:
    assert main(["import", "theirs", "ours", "--target", "target", "--set", "fc_norm=true"]) == 2
    assert "fc_norm.0.weight is missing" in capsys.readouterr().err
    assert not Path("ours").exists()
    assert not [path for path in Path().iterdir() if "partial" in path.name]


@pytest.mark.parametrize("form", FORMS)
def test_export_then_generate(here, form, capsys) -> None:
    assert main(["export", "drafters/pr", "--to", form, "out", "--base-model", "someone/target"]) == 0
    assert "README.md says how to serve it" in " ".join(capsys.readouterr().out.split())
    assert main(["generate", "target", "ab", "--method", "ar,pr", "--drafter", "out", "--json", "out.json"]) == 0
    plain, pr = json.loads(Path("out.json").read_text())["results"]
    assert plain["token_ids"] == pr["token_ids"]
    card = Path("out/README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "base_model": "someone/target",
        "library_name": "secondguess",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "parallel-reconsideration"],
    }
    assert "# PR drafter for someone/target" in text
    assert "secondguess serve someone/target --drafter out" in text
    vllm = "vllm serve out" if form == "speculators" else "vllm serve someone/target --speculative-config"
    assert vllm in text
    assert ("--speculative-algorithm EAGLE3" in text) == (form == "eagle3")


def test_the_card_has_the_recorded_acceptance_length(here) -> None:
    path = Path("drafters/pr/config.json")
    config = json.loads(path.read_text())
    probe = {"acceptance_length": 2.25, "method": "pr", "budget": 24, "max_new_tokens": 32}
    settings = {"responses": "/home/me/answers.jsonl", "out": "run", "method": "pr", "carry": "half", "lr": 1e-3}
    training = {"num_responses": 1399, "steps": 700, "seconds": 1210.0, "settings": settings}
    config["secondguess"] |= {"probe": probe, "training": training}
    path.write_text(json.dumps(config))
    export(Path("drafters/pr"), "eagle3", Path("out"), None, None)
    card = Path("out/README.md").read_text()
    assert "Acceptance length 2.25" in card
    assert "1399 answers of the target itself for 700 steps, 20 minutes of steps alone." in card
    assert "/home/me" not in card + Path("out/config.json").read_text()
    assert retraining_of(card) == {"method": "pr", "carry": "half", "lr": 1e-3, "target": "tiny"}


def retraining_of(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.partition("```yaml")[2].partition("```")[0])


def with_block(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["secondguess"] |= more
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["eagle3.1", "pr"])
def test_the_cards_that_ship_are_made_by_the_code_and_train_the_same_again(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(SHIPPED / "smollm2-135m" / name, tmp_path / name)
    (folder / "README.md").unlink()
    write_card(folder, None)
    card = (folder / "README.md").read_text()
    assert card == (SHIPPED / "smollm2-135m" / name / "README.md").read_text()
    assert "\nlicense: apache-2.0\n" in card
    training = read_settings(folder)[1]["training"]["settings"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(retraining_of(card)))
    again = load_config(tmp_path / "run.yaml", ["responses=a", "out=b"]).decisive
    assert {key: value for key, value in again.items() if key not in PLACES} == {
        key: value for key, value in training.items() if key not in (*PLACES, *idle(name))
    }


@pytest.mark.parametrize(
    ("drafter", "method", "title"),
    [("eagle3.1", "hass", "HASS"), ("pr", "hass+pr", "HASS + PR"), ("pr", "pr", "PR"), ("eagle3.1", None, "EAGLE-3.1")],
)
def test_a_card_is_titled_by_what_was_trained(drafter: str, method: str | None, title: str, here) -> None:
    folder = with_block(Path("drafters") / drafter, method=method)
    write_card(folder, "a/b")
    card = (folder / "README.md").read_text()
    assert f"\n# {title} drafter for a/b\n" in card
    assert f"`secondguess serve a/b --drafter {drafter} --method {method or drafter}`" in card


@pytest.mark.parametrize(
    ("given", "shown"),
    [("/home/me/mine", "FOLDER"), ("drafters/eagle3.1", "FOLDER"), ("none", "none"), ("eagle3.1", "eagle3.1"),
     ("them/theirs", "them/theirs"), ("smollm2-135m/pr", "smollm2-135m/pr")],
)  # fmt: skip
def test_folders_of_this_machine_are_not_published(given: str, shown: str, here) -> None:
    settings = {"target": "/home/me/model", "method": "pr", "warm_start": given, "anchor_to": given}
    with_block(Path("drafters/pr"), training={"settings": settings})
    export(Path("drafters/pr"), "eagle3", Path("out"), "a/b", None)
    card = Path("out/README.md").read_text()
    said = {"target": "a/b", "method": "pr", "warm_start": shown, "anchor_to": shown}
    assert retraining_of(card) == said
    assert read_settings(Path("out"))[1]["training"]["settings"] == said
    assert ("`FOLDER` is a drafter that was not published" in card) == (shown == "FOLDER")


def test_a_card_tells_what_the_start_took(here) -> None:
    start = {"name": "eagle3.1", "num_responses": 90, "steps": 30, "seconds": 600, "start": {"name": "FOLDER"}}
    training = {"num_responses": 80, "steps": 20, "seconds": 300, "wall_seconds": 420, "num_processes": 2}
    write_card(with_block(Path("drafters/pr"), training=training | {"start": start}), None)
    assert (
        "Trained on 80 answers of the target itself for 20 steps, 7 minutes in all by 2 processes, from `eagle3.1`, "
        "which was trained on 90 answers of the target itself for 30 steps, 10 minutes of steps alone, from `FOLDER`."
    ) in Path("drafters/pr/README.md").read_text()


def eval_row(method: str, task: str, temperature: float, tau: float | None, *gain: float) -> dict[str, Any]:
    shape = {"budget": 24, "grow_width": 6, "offer_width": 6, "num_steps": 8, "num_reconsider": 3 * (method == "pr")}
    gains = dict(
        zip(("gain_nonlooping", "gain_nonlooping_low", "gain_nonlooping_high"), gain or [None] * 3, strict=True)
    )
    return {"method": method, "task": task, "temperature": temperature, "num_prompts": 20, **shape,
            "acceptance_length_nonlooping": tau, **gains}  # fmt: skip


def test_what_a_card_is_told_is_kept_and_exported(here, capsys) -> None:
    first = "eagle3.1:drafter=/home/me/x,k=6"
    rows = [eval_row(first, "gsm8k", 0.0, 3.5), eval_row("pr", "gsm8k", 0.0, 3.59, 0.0164, -0.0071, 0.0399),
            eval_row(first, "gsm8k", 1.0, None), eval_row("pr", "gsm8k", 1.0, None)]  # fmt: skip
    Path("found").mkdir()
    record = {"time": "2026-11-30T12:35:19+00:00"}
    Path("found/eval.json").write_text(json.dumps({"record": record, "rows": rows}))
    told = ["--data", "Questions of ours.", "--licence", "mit", "--measured", str(here / "found" / "eval.json")]
    assert main(["card", "drafters/pr", *told, "--base-model", "a/b"]) == 0
    card = Path("drafters/pr/README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "mit"
    assert "\n## Data\n\nQuestions of ours.\n\nLicence: mit.\n" in card
    assert "method pr (grow_width 6, offer_width 6, num_steps 8, num_reconsider 3); gains over eagle3.1" in card
    assert "eagle3.1:drafter=FOLDER,k=6 with 95 %" in card
    assert "2026-11-30, `found/eval.json`." in card
    assert "| task | prompts | T = 0, budget 24 | T = 1, budget 24 |\n" in card
    assert "| gsm8k | 20 | 3.59 (+1.6 % [-0.7, 4.0]) | - |\n" in card
    assert main(["card", "drafters/pr", "--licence", "apache-2.0", "--base-model", "a/b"]) == 0
    assert Path("drafters/pr/README.md").read_text() == card.replace(" mit", " apache-2.0")
    assert main(["export", "drafters/pr", "--to", "speculators", "out", "--base-model", "a/b"]) == 0
    exported = Path("out/README.md").read_text()
    assert "| gsm8k | 20 | 3.59 (+1.6 % [-0.7, 4.0]) | - |\n" in exported
    assert main(["card", "out"]) == 0
    assert Path("out/README.md").read_text() == exported, "also of this form"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--licence", ""], "--licence is empty"),
        (["--measured", "other.json"], "other.json has no rows of pr, only of ar: evaluate --method pr"),
        (["--measured", "bad.json"], "bad.json is no result of 'secondguess eval --json'"),
        (["--measured", "none.json"], "none.json is no result of"),
    ],
)
def test_what_a_card_cannot_say_is_one_line(flags, said, here, capsys) -> None:
    Path("other.json").write_text(json.dumps({"record": {"time": "now"}, "rows": [eval_row("ar", "a", 0.0, 1.0)]}))
    Path("bad.json").write_text('{"rows": []}')
    assert main(["card", "drafters/pr", *flags]) == 2
    assert said in capsys.readouterr().err
    assert not Path("drafters/pr/README.md").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["export", "nowhere", "--to", "eagle3", "out"], "no drafter 'nowhere'"),
        (["export", "drafters/pr", "--to", "gguf", "out"], "invalid choice: 'gguf'"),
        (["export", "drafters/pr", "out"], "required: --to"),
        (["export", "drafters/pr", "--to", "eagle3", "drafters"], "is not empty"),
        (["export", "drafters/pr", "--to", "eagle3", "out", "--max-positions", "0"], "--max-positions must be"),
        (["export", "theirs", "--to", "eagle3", "out"], "'secondguess import'"),
        (["import", "drafters/pr", "out", "--target", "target"], "needs no import"),
        (["import", "theirs", "out", "--target", "target", "--set", "norm=1"], "unknown setting 'norm'"),
        (["import", "theirs", "out"], "required: --target"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(here, argv, said, capsys) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.splitlines()[-1].startswith("secondguess: ")


def test_a_damaged_drafter_is_not_exported(here, capsys) -> None:
    shutil.copytree("drafters/pr", "broken")
    change(Path("broken"), norm__weight=None)
    assert main(["export", "broken", "--to", "eagle3", "out"]) == 2
    assert "norm.weight" in capsys.readouterr().err
    assert not Path("out").exists()
