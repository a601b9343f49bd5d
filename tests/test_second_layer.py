"""EAGLE-3.1 with a second layer: checkpoints, the same text as plain decoding."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_drafter, save_drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Plain
from secondguess.errors import UserError
from secondguess.testing import tiny_drafter, tiny_target
from test_engine import MAX_LEN, ROOM, decode, random_requests


def test_the_first_layer_starts_as_that_of_a_drafter_with_one() -> None:
    target = tiny_target("llama")
    one, two = (dict(tiny_drafter(target, num_layers=n).named_parameters()) for n in (1, 2))
    assert {name for name in two.keys() - one.keys() if not name.startswith("layers.1.")} == set()
    assert one.keys() < two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("seed", range(12))
def test_its_texts_are_plain_decoding_s(seed: int) -> None:
    rng = random.Random(seed)
    target = tiny_target(rng.choice(["llama", "gemma3"]), seed, rng.choice([torch.float64, torch.float32]), 12)
    drafter = tiny_drafter(target, seed, num_layers=2)
    tree = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3, num_reconsider=seed % 3)
    for temperature in (0.0, 1.0):
        requests = random_requests(rng, target.spec.vocab_size, temperature, 3)
        plain = [decode(target, Plain(), [request])[0].emitted for request in requests]
        speculator = EagleSpeculator(drafter, tree, 3, MAX_LEN + ROOM)
        assert [s.emitted for s in decode(target, speculator, requests)] == plain


def test_its_checkpoint_comes_back(tmp_path: Path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    drafter = tiny_drafter(target, num_layers=2)
    save_drafter(drafter, tmp_path, {}, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
    second = {name for name in load_file(tmp_path / "model.safetensors") if name.startswith("layers.")}
    assert {"layers.1.self_attn.q_proj.weight", "layers.1.input_layernorm.weight"} <= second
    assert "layers.1.hidden_norm.weight" not in second
    again = load_drafter(tmp_path, target.embedding, target.spec.num_layers)
    assert again.config == drafter.config
    for name, parameter in drafter.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name


def test_layers_that_the_settings_do_not_speak_of_are_refused(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_drafter(tiny_drafter(target, num_layers=2), tmp_path, {})
    path = tmp_path / "config.json"
    for count, said in ((1, r"unknown tensors: layers\.1\."), (3, r"layers\.2\."), (9, "must be at most 8, got 9")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": count}))
        with pytest.raises(UserError, match=said):
            load_drafter(tmp_path, target.embedding, target.spec.num_layers)
