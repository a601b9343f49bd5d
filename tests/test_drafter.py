"""The drafter: rows do not depend on what else is computed, checkpoints round-trip, the wrong ones are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from secondguess.config import SecondLook, TreeConfig
from secondguess.drafter import shipped
from secondguess.drafter.checkpoint import load_drafter, save_drafter
from secondguess.drafter.settings import read_settings
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.drafter.vocab import choose_vocab, count_tokens, coverage, from_offsets, target_to_draft, to_offsets
from secondguess.engine.speculate import GREEDY, Accepted, Draw, Roots
from secondguess.errors import UserError
from secondguess.target.fingerprint import embedding_fingerprint
from secondguess.testing import tiny_drafter, tiny_target

PROMPTS = [[5, 9, 2, 7, 1], [3, 3, 8]]


def speculator(target, num_reconsider: int, dtype=torch.float64) -> EagleSpeculator:
    tree = TreeConfig(budget=20, num_steps=4, grow_width=3, offer_width=3, num_reconsider=num_reconsider)
    return EagleSpeculator(tiny_drafter(target).to(dtype), tree, num_slots=2, num_columns=64)


def prime(s: EagleSpeculator, target, prompts, draws=(GREEDY, GREEDY)) -> Roots:
    """Give the speculator prompts with made-up taps."""
    generator = torch.Generator().manual_seed(0)
    for slot, prompt in enumerate(prompts):
        taps = torch.randn(len(prompt), 3, target.spec.hidden_size, generator=generator, dtype=torch.float64)
        s.accept([Accepted(slot, torch.tensor([*prompt[1:], 6]), taps.to(s.drafter.norm.weight.dtype))])
    return Roots(tuple(range(len(prompts))), (6,) * len(prompts), tuple([*p, 6] for p in prompts), draws)


def recorded(s: EagleSpeculator, roots: Roots) -> list[torch.Tensor]:
    """Level-0 features of every forward of a draft."""
    features, run = [], s.run

    def spy(rows, e_RXH, g_RXH):
        f_RXH = run(rows, e_RXH, g_RXH)
        features.append(f_RXH)
        return f_RXH

    s.run = spy  # type: ignore[method-assign]
    s.draft(roots)
    return features


def test_level0_rows_do_not_depend_on_reconsidered_rows() -> None:
    """Step 1 forwards the same nodes whatever m is; what comes after may differ, since refined nodes are grown too."""
    target = tiny_target("llama")
    first = {}
    for m in (0, 3):
        s = speculator(target, m)
        first[m] = recorded(s, prime(s, target, PROMPTS))[1][:, :3]
    assert first[0].shape == first[3].shape
    assert (first[0] - first[3]).abs().max() < 1e-12


def test_bfloat16_drafters_keep_positions_apart() -> None:
    """In bfloat16 itself 600 and 601 are one number, and so are 256 and 257."""
    target = tiny_target("llama", dtype=torch.float32)
    drafter, generator = tiny_drafter(target), torch.Generator().manual_seed(0)
    e_XH, g_XH = torch.randn(2, 1, target.spec.hidden_size, generator=generator).expand(2, 2, -1)
    positions_X = torch.tensor([600, 601])
    _, k_XGD, _ = drafter.midlayer.project(e_XH, g_XH, drafter.rotation(positions_X))
    half = tiny_drafter(target).to(torch.bfloat16)
    _, half_XGD, _ = half.midlayer.project(e_XH.bfloat16(), g_XH.bfloat16(), half.rotation(positions_X))
    moved = (k_XGD[0] - k_XGD[1]).abs().max()
    assert (half_XGD[0] - half_XGD[1]).abs().max() > 0.5 * moved
    assert (half_XGD.float() - k_XGD).abs().max() < 0.1 * moved


def test_a_request_drafts_the_same_tree_alone_and_in_a_batch() -> None:
    target = tiny_target("llama")
    both, alone = speculator(target, 3), speculator(target, 3)
    tree = both.draft(prime(both, target, PROMPTS))
    one = alone.draft(prime(alone, target, PROMPTS[:1]))
    assert torch.equal(tree.tokens_RN[0], one.tokens_RN[0])
    assert torch.equal(tree.parents_RN[0], one.parents_RN[0])


def test_a_greedy_request_drafts_the_same_tree_coupled_or_not_beside_a_sampled_one() -> None:
    target = tiny_target("llama")
    coupled, uncoupled = speculator(target, 3), speculator(target, 3)
    coupled.config = replace(coupled.config, coupled=True)
    tree = coupled.draft(prime(coupled, target, PROMPTS, (GREEDY, Draw(1.0, seed=7))))
    plain = uncoupled.draft(prime(uncoupled, target, PROMPTS))
    assert torch.equal(tree.tokens_RN[0], plain.tokens_RN[0])
    assert torch.equal(tree.scores_RN[0], plain.scores_RN[0])
    assert not torch.equal(tree.tokens_RN[1], plain.tokens_RN[1])


def test_extending_in_pieces_equals_extending_at_once() -> None:
    """Accepted tokens come a few at a time; the columns they leave are those of one long prompt."""
    target = tiny_target("llama")
    s, whole = speculator(target, 3), speculator(target, 3)
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(9, 3, target.spec.hidden_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(64, (9,), generator=generator)
    s.accept([Accepted(0, tokens[:4], taps[:4])])
    s.draft(Roots((0,), (int(tokens[3]),), ([int(tokens[3])],), (GREEDY,)))
    s.accept([Accepted(0, tokens[4:6], taps[4:6])])
    s.accept([Accepted(0, tokens[6:], taps[6:])])
    whole.accept([Accepted(0, tokens, taps)])
    root = Roots((0,), (int(tokens[8]),), ([int(tokens[8])],), (GREEDY,))
    pieces_tree, whole_tree = s.draft(root), whole.draft(root)
    assert torch.equal(pieces_tree.tokens_RN, whole_tree.tokens_RN)
    assert (pieces_tree.scores_RN - whole_tree.scores_RN)[pieces_tree.valid_RN].abs().max() < 1e-10


@pytest.mark.parametrize("look", [None, SecondLook(), SecondLook(query_slot="own_token", query_rope="next")], ids=str)
def test_checkpoint_round_trip(tmp_path, look: SecondLook | None) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    drafter = tiny_drafter(target, reconsideration=look is not None, look=look)
    save_drafter(drafter, tmp_path, {"target": "tiny"}, dtype=torch.float32)
    again = load_drafter(tmp_path, target.embedding, target.spec.num_layers)
    assert again.config == drafter.config
    assert torch.equal(again.target_ids, drafter.target_ids)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name


def test_checkpoint_is_eagle3_for_other_engines(tmp_path) -> None:
    """Exactly the tensors and flags of the flat EAGLE-3.1 format: an extra tensor would break vLLM."""
    save_drafter(tiny_drafter(tiny_target("llama")), tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    block = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    attention = [f"self_attn.{x}_proj" for x in "qkvo"]
    mlp = [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    expected = {f"midlayer.{x}.weight" for x in [*block, *attention, *mlp]}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert tensors.keys() == expected
    assert tensors["t2d"].sum() == len(tensors["d2t"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["fc_norm"], config["norm_output"], config["norm_before_residual"]) == (True, True, False)
    assert config["tie_word_embeddings"] is False


def test_drafter_of_another_target_is_refused(tmp_path) -> None:
    save_drafter(tiny_drafter(tiny_target("llama", 0)), tmp_path, {"target": "tiny-0"})
    other = tiny_target("llama", 1)
    with pytest.raises(UserError, match="trained for tiny-0"):
        load_drafter(tmp_path, other.embedding, other.spec.num_layers)


def test_a_target_is_known_in_float32_and_bfloat16_but_not_in_float16(tmp_path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    save_drafter(tiny_drafter(target), tmp_path, {})
    for dtype in (torch.float64, torch.bfloat16):
        load_drafter(tmp_path, target.embedding.to(dtype), target.spec.num_layers)
    with pytest.raises(UserError, match="load the target in bfloat16 or float32"):
        load_drafter(tmp_path, target.embedding.half(), target.spec.num_layers)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A target and the folder of a good drafter for it."""
    target, folder = tiny_target("llama"), tmp_path_factory.mktemp("whole")
    save_drafter(tiny_drafter(target), folder, {})
    return target, folder


def load_copy(whole, tmp_path, config=None, tensors=None):
    """Load a copy of the drafter in which ``config`` and ``tensors`` were replaced; None takes a key out."""
    target, folder = whole
    copy = shutil.copytree(folder, tmp_path / "copy")
    for changes, path, read, write in (
        (config, copy / "config.json", lambda p: json.loads(p.read_text()), lambda v, p: p.write_text(json.dumps(v))),
        (tensors, copy / "model.safetensors", load_file, save_file),
    ):
        if changes:
            write({k: v for k, v in {**read(path), **changes}.items() if v is not None}, path)
    return load_drafter(copy, target.embedding, target.spec.num_layers)


def block(**changes) -> dict:
    """The ``secondguess`` block of the tiny drafter, changed."""
    target = tiny_target("llama")
    good = {
        "target_num_layers": 8,
        "target_embedding": embedding_fingerprint(target.embedding),
        "reconsideration": True,
    }
    return {"secondguess": {k: v for k, v in (good | changes).items() if v is not None}}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"norm_output": False}, "norm_output must be true"),
        ({"norm_output": 1}, "norm_output must be true"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act must be"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling must be null"),
        ({"secondguess": None}, "no secondguess block"),
        ({"secondguess": {}}, "no secondguess block"),
        ({"secondguess": "pr"}, "no secondguess block"),
        (block(target_embedding=None), "lacks target_embedding"),
        (block(target_num_layers="8"), "target_num_layers must be a whole number"),
        (block(reconsideration="yes"), "reconsideration must be true or false"),
        (block(second_look="own_token"), "second_look must hold see_own_level0, query_slot, query_rope"),
        (block(second_look={"query_slt": "own_token"}), "unknown setting 'query_slt'; did you mean query_slot"),
        (block(second_look={"query_slot": "token"}), "query_slot must be one of self_query, own_token"),
        (block(second_look={"see_own_level0": 1}), "see_own_level0 must be true or false"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"head_dim": -8}, "head_dim must be a whole number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 0"),
        ({"rope_theta": 5.0}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}}, "rope_parameters"),
        ({"rope_parameters": []}, "rope_parameters"),
        (block(flags={"fc_norm": True}), "lacks norm_output"),
        (block(flags=[1]), "flags must be an object"),
        (block(own_embedding="no"), "own_embedding must be true or false"),
        (block(tap_layers=[1, 1, 4]), "taps must be different layers of 0 to 7"),
        (block(tap_layers=[1, 4, 8]), "taps must be different layers of 0 to 7"),
        ({"hidden_size": 48}, "an embedding of its own"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be a whole number"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "other taps"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, "other taps"),
        ({"num_key_value_heads": 3}, "multiple of key/value heads"),
        ({"vocab_size": 65}, "not for this target"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is larger"),
        ({"draft_vocab_size": 31}, "d2t must hold 31"),
        ({"intermediate_size": 65}, "expected"),
    ],
)
def test_settings_of_another_network_are_refused(whole, tmp_path, config: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_copy(whole, tmp_path, config=config)


OFFSETS = to_offsets(torch.arange(32))


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"extra": torch.zeros(1)}, "extra"),
        ({"norm.weight": None}, r"norm\.weight"),
        ({"norm.weight": torch.ones(3)}, "expected"),
        ({"d2t": None}, "d2t or t2d is missing"),
        ({"t2d": None}, "d2t or t2d is missing"),
        ({"d2t": OFFSETS.float()}, "int64 offsets"),
        ({"d2t": OFFSETS[:-1]}, "32 int64 offsets"),
        ({"d2t": OFFSETS + 60}, "outside the target's vocabulary"),
        ({"d2t": OFFSETS - 1}, "outside the target's vocabulary"),
        ({"d2t": OFFSETS}, "disagree"),
        ({"d2t": -torch.arange(32), "t2d": torch.arange(64) == 0}, "disagree"),
        ({"t2d": torch.ones(64)}, "disagree"),
        ({"t2d": torch.ones(3, dtype=torch.bool)}, "disagree"),
    ],
)
def test_damaged_tensors_are_refused(whole, tmp_path, tensors: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_copy(whole, tmp_path, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("model.safetensors", b"nonsense", "not a readable safetensors"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"\xff", "not JSON"),
        ("config.json", b"[1]", "no secondguess block"),
        ("config.json", None, "no drafter at"),
        ("reconsider/query.safetensors", None, "drafter is incomplete"),
    ],
)
def test_damaged_files_are_refused(whole, tmp_path, name: str, content: bytes | None, match: str) -> None:
    target, folder = whole
    path = shutil.copytree(folder, tmp_path / "copy") / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=match):
        load_drafter(tmp_path / "copy", target.embedding, target.spec.num_layers)


@pytest.mark.parametrize("name", ["eagle3.1", "pr"])
def test_shipped_settings_are_as_strict(name: str) -> None:
    config, _ = read_settings(shipped.SHIPPED / "smollm2-135m" / name)
    assert config.second_look == (SecondLook() if name == "pr" else None)


def test_a_folder_is_not_mistaken_for_a_shipped_drafter(tmp_path, monkeypatch) -> None:
    target = tiny_target("llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "package")
    save_drafter(tiny_drafter(target), tmp_path / "package" / "tiny" / "pr", {})
    (tmp_path / "pr").mkdir()
    assert shipped.find_drafter(None, "pr", target.embedding) == tmp_path / "package" / "tiny" / "pr"
    assert shipped.find_drafter("pr", "pr", target.embedding) == Path("pr")
    assert shipped.find_drafter(tmp_path / "pr", "eagle3.1", target.embedding) == tmp_path / "pr"
    with pytest.raises(UserError, match=r"no drafter 'eagle3\.1': no such drafter ships; .* are: pr"):
        shipped.find_drafter(None, "eagle3.1", target.embedding)
    with pytest.raises(UserError, match="the drafter's name is empty"):
        shipped.find_drafter("", "pr", target.embedding)


def test_a_drafter_of_the_hub_is_downloaded(tmp_path, monkeypatch) -> None:
    target, asked = tiny_target("llama"), list[str]()
    save_drafter(tiny_drafter(target), tmp_path / "there", {})

    def hub(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append(name)
        if name == "someone/unknown":
            raise OSError("no route\nto the hub")
        files = [str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*.*")]
        assert all(any(fnmatch(file, pattern) for pattern in allow_patterns) for file in files)
        return str(tmp_path / "there")

    monkeypatch.setattr(shipped, "snapshot_download", hub)
    for found in (shipped.find_drafter("someone/pr", "pr", target.embedding), shipped.find_alone("someone/pr")):
        assert load_drafter(found, target.embedding, target.spec.num_layers).config.has_self_query
    unknown = r"no drafter 'someone/unknown': no such folder, and the hub did not give it \(no route\); those that ship"
    with pytest.raises(UserError, match=unknown):
        shipped.find_drafter("someone/unknown", "pr", target.embedding)
    for name in ("nowhere", "./no/where", "/no/where"):
        with pytest.raises(UserError, match="no such folder; those that ship"):
            shipped.find_drafter(name, "pr", target.embedding)
    assert asked == ["someone/pr", "someone/pr", "someone/unknown"]


def test_draft_vocabulary() -> None:
    counts = count_tokens([[5, 5, 7], [7, 5, 2]], vocab_size=10)
    assert counts.tolist() == [0, 0, 1, 0, 0, 3, 0, 2, 0, 0]
    ids = choose_vocab(counts, 4)
    assert ids.tolist() == [0, 2, 5, 7]  # 0 is unseen: ties go to the lower id
    assert coverage(counts, choose_vocab(counts, 2)) == pytest.approx(5 / 6)
    assert torch.equal(from_offsets(to_offsets(ids)), ids)
    assert to_offsets(ids).tolist() == [0, 1, 3, 4]
    assert target_to_draft(ids, 10).tolist() == [0, -1, 1, -1, -1, 2, -1, 3, -1, -1]
    with pytest.raises(UserError, match="larger than the target's"):
        choose_vocab(counts, 11)
