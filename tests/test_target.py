"""Targets against plain transformers forwards over whole texts."""

from __future__ import annotations

import copy
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from secondguess.engine.slots import SlotCache
from secondguess.errors import UserError
from secondguess.target.fingerprint import model_fingerprint
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_target
from secondguess.types import Rows, TargetOut
from tiny_folder import save_tiny

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
BUDGET = 6


@dataclass
class Tree:
    """A random tree of one request; parents come first."""

    tokens: list[int]
    parents: list[int]
    paths: list[list[int]] = field(default_factory=list)  # root first, the node itself last

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), node])


def random_tree(rng: random.Random, vocab_size: int) -> Tree:
    parents = [-1, *(rng.randrange(max(0, node - 3), node) for node in range(1, BUDGET + 1))]
    return Tree([rng.randrange(vocab_size) for _ in parents], parents)


def prefill(target: HFTarget, cache: SlotCache, slot: int, text: list[int]) -> TargetOut:
    at = torch.arange(len(text))[None]
    visible = torch.ones(1, len(text), len(text), dtype=torch.bool).tril()
    return target.forward(Rows(torch.tensor([slot]), torch.tensor([text]), at, at, visible, at), cache, last_only=True)


def verify(
    target: HFTarget, cache: SlotCache, slots: list[int], texts: list[list[int]], trees: list[Tree]
) -> TargetOut:
    n, width = BUDGET + 1, max(map(len, texts)) + BUDGET + 1
    bases = torch.tensor([len(text) for text in texts])
    columns = bases[:, None] + torch.arange(n)
    positions = torch.tensor([[len(path) - 1 for path in tree.paths] for tree in trees]) + bases[:, None]
    visible = torch.zeros(len(texts), n, width, dtype=torch.bool)
    for r, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        visible[r, :, : len(text)] = True
        for node, path in enumerate(tree.paths):
            visible[r, node, columns[r, path]] = True
    column_positions = torch.arange(width).repeat(len(texts), 1).scatter(1, columns, positions)
    tokens = torch.tensor([tree.tokens for tree in trees])
    return target.forward(Rows(torch.tensor(slots), tokens, positions, columns, visible, column_positions), cache)


def commit(cache: SlotCache, slots: list[int], texts: list[list[int]], trees: list[Tree], nodes: list[int]) -> None:
    """Accept the paths to ``nodes``."""
    paths = [tree.paths[node] for tree, node in zip(trees, nodes, strict=True)]
    starts = torch.tensor([len(text) for text in texts])
    source = torch.tensor([(path + [0] * BUDGET)[: BUDGET + 1] for path in paths]) + starts[:, None]
    cache.compact(torch.tensor(slots), source, starts, torch.tensor([len(path) for path in paths]))
    for text, tree, path in zip(texts, trees, paths, strict=True):
        text += [tree.tokens[node] for node in path]


def plain_model(target: HFTarget) -> AutoModelForCausalLM:
    # Not "eager": that does its softmax in float32.
    config = copy.deepcopy(target.model.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    model.load_state_dict(target.model.state_dict())
    return model.eval()


def plain(model: AutoModelForCausalLM, target: HFTarget, text: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [V] and taps [L, H] of the last token."""
    with torch.no_grad():
        out = model(torch.tensor([text]), output_hidden_states=True)
    return out.logits[0, -1], torch.stack([out.hidden_states[layer][0, -1] for layer in target.spec.tap_layers])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [[0, 1], [2, 0]])
def test_trees_equal_plain_forwards(family: str, slots: list[int]) -> None:
    """Two requests of different lengths (beyond the sliding window of 8), three cycles with commits."""
    target = tiny_target(family, seed=len(slots))
    model, rng = plain_model(target), random.Random(slots[0])
    cache = target.new_cache(3, 64)
    texts = [[rng.randrange(64) for _ in range(length)] for length in (13, 22)]
    for slot, text in zip(slots, texts, strict=True):
        out = prefill(target, cache, slot, text)
        torch.testing.assert_close(out.logits_RNV[0, 0], plain(model, target, text)[0], atol=1e-9, rtol=0)
    for _ in range(3):
        trees = [random_tree(rng, 64) for _ in texts]
        out = verify(target, cache, slots, texts, trees)
        for r, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            for node, path in enumerate(tree.paths):
                logits, taps = plain(model, target, text + [tree.tokens[ancestor] for ancestor in path])
                torch.testing.assert_close(out.logits_RNV[r, node], logits, atol=1e-9, rtol=0)
                torch.testing.assert_close(out.taps_RNLH[r, node], taps, atol=1e-9, rtol=0)
        commit(cache, slots, texts, trees, [rng.randrange(BUDGET + 1) for _ in texts])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hidden_size", [32, 128])
def test_float32_trees_equal_one_token_at_a_time(family: str, hidden_size: int) -> None:
    """To the bit: a row does not depend on what is computed with it."""
    target = tiny_target(family, dtype=torch.float32, hidden_size=hidden_size)
    rng = random.Random(0)
    cache = target.new_cache(2, 64)
    texts = [[rng.randrange(64) for _ in range(length)] for length in (17, 30)]
    trees = [random_tree(rng, 64) for _ in texts]
    for slot, text in enumerate(texts):
        prefill(target, cache, slot, text)
    out = verify(target, cache, [0, 1], texts, trees)
    for r, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        alone, column = target.new_cache(1, 64), len(text)
        prefill(target, alone, 0, text)
        for node in max(tree.paths, key=len):
            at, seen = torch.tensor([[column]]), torch.arange(column + 1)[None]
            visible = torch.ones(1, 1, column + 1, dtype=torch.bool)
            one = target.forward(
                Rows(torch.tensor([0]), torch.tensor([[tree.tokens[node]]]), at, at, visible, seen), alone
            )
            assert torch.equal(one.logits_RNV[0, 0], out.logits_RNV[r, node])
            assert torch.equal(one.taps_RNLH[0, 0], out.taps_RNLH[r, node])
            column += 1


def test_softcap_and_head() -> None:
    target = tiny_target("gemma3")
    out = prefill(target, target.new_cache(1, 8), 0, [1, 2, 3])
    assert out.logits_RNV.shape == (1, 1, 64)
    expected = 3.0 * torch.tanh(out.hidden_RNH[0, -1] @ target.head_weight.T / 3.0)
    torch.testing.assert_close(out.logits_RNV[0, 0], expected)


def test_outputs_can_enter_training() -> None:
    target = tiny_target("llama")
    weight = torch.ones(32, dtype=torch.float64, requires_grad=True)
    (prefill(target, target.new_cache(1, 8), 0, [1, 2, 3]).taps_RNLH * weight).sum().backward()


def test_threads_share_a_target() -> None:
    target = tiny_target("llama", dtype=torch.float32)
    texts = [[(3 * i + j) % 64 for j in range(20 + i)] for i in range(4)]

    def taps(text: list[int]) -> list[Tensor]:
        cache = target.new_cache(1, 64)
        return [prefill(target, cache, 0, text).taps_RNLH for _ in range(10)]

    alone = [taps(text)[0] for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for expected, repeated in zip(alone, pool.map(taps, texts), strict=True):
            assert all(torch.equal(expected, found) for found in repeated)


def test_a_saved_folder_loads(tmp_path) -> None:
    target = tiny_target("llama")
    plain_model(target).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot load target"):  # no tokenizer there
        load_target(str(tmp_path), dtype="float64")


def test_a_folder_that_lacks_a_weight(tmp_path) -> None:
    weights = save_tiny(tmp_path) / "target" / "model.safetensors"
    tensors = load_file(weights)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"target do not fit its config: model\.norm\.weight is missing$"):
        load_target(str(tmp_path / "target"))
    gate = tensors.pop("model.layers.2.mlp.gate_proj.weight")
    save_file(tensors | {"model.norm.weight": norm[:7]}, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"gate_proj\.weight is missing \(and 1 more\)"):
        load_target(str(tmp_path / "target"))
    tensors |= {"model.norm.weight": norm[:7], "model.layers.2.mlp.gate_proj.weight": gate}
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \[7\], not \[32\]$"):
        load_target(str(tmp_path / "target"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_checkpoint_with_images(prefix: str, tmp_path) -> None:
    """Gemma-3-12B's is one, with the first of these names; transformers also writes the second."""
    folder = save_tiny(tmp_path, family="gemma3") / "target"
    alone = load_target(str(folder))
    tensors = {name.replace("model.", prefix, 1): x for name, x in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    (folder / "config.json").write_text(json.dumps(whole))
    found = load_target(str(folder))
    assert found.facts.weights == alone.facts.weights
    assert found.spec == alone.spec
    ours, theirs = (prefill(target, target.new_cache(1, 8), 0, [5, 3, 9, 4]) for target in (found, alone))
    assert torch.equal(ours.logits_RNV, theirs.logits_RNV)
    del tensors[f"{prefix}norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight is missing$"):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the target's name is empty"),
        ("no/such/folder/at-all", "no such target"),
        ("nothing.gguf", "cannot read nothing.gguf"),
    ],
)
def test_unknown_targets(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_target(name)
    assert "\n" not in str(caught.value)


def test_unsupported_family(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="'gpt2' is not supported; supported are llama, qwen2"):
        load_target(str(tmp_path))


def test_unknown_dtype() -> None:
    with pytest.raises(UserError, match="choose one of float32"):
        load_target("smollm2-135m", dtype="int3")


def test_shallow_models_cannot_be_tapped() -> None:
    with pytest.raises(UserError, match="has 4 layers"):
        tiny_target("llama", num_layers=4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_text_are_refused(kind: str) -> None:
    model = plain_model(tiny_target("llama"))
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(UserError, match=f"rope_type '{kind}' is not supported"):
        HFTarget(model)


def change_one(model) -> None:
    model.base_model.embed_tokens.weight.data[-1, -1] += 1.0


def swap_two(model) -> None:
    row = model.base_model.layers[3].mlp.down_proj.weight.data[-1]
    row[[0, 1]] = row[[1, 0]]


def change_config(model) -> None:
    model.config.rms_norm_eps = 0.5


@pytest.mark.parametrize("change", [change_one, swap_two, change_config, lambda model: model.float()])
def test_a_fingerprint_changes_with_weights_config_and_precision(change) -> None:
    def fingerprint(alter) -> str:
        model = plain_model(tiny_target("llama", vocab_size=257))
        alter(model)
        return model_fingerprint(model)

    assert fingerprint(lambda model: None) == fingerprint(lambda model: None) != fingerprint(change)


def test_a_damaged_config_is_a_users_mistake(tmp_path) -> None:
    config = save_tiny(tmp_path) / "target" / "config.json"
    whole = json.loads(config.read_text())
    for damaged in (None, whole | {"num_attention_heads": 0}, whole | {"hidden_act": "nosuch"}):
        config.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="cannot load target"):
            load_target(str(tmp_path / "target"))
