"""A target that torchrun spreads over two processes writes what it writes in one."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import weakref
from inspect import isfunction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from secondguess.cli import main
from secondguess.engine.slots import SlotCache
from secondguess.errors import UserError
from secondguess.target import spread
from secondguess.target.base import causal_rows
from secondguess.target.load import find_files, load_target, read
from secondguess.target.spread import (
    NO_CACHE,
    WORKS,
    Follower,
    Leader,
    LeaderCache,
    Line,
    Work,
    check_shares,
    load_spread,
)
from target_in_parts import METHODS, decode
from tiny_folder import save_tiny

START = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TWO = (*START, "-m", "secondguess")
PARTS = Path(__file__).with_name("target_in_parts.py")


def command(folder: Path, out: Path) -> list[str]:
    models = [str(folder / "target"), "--drafter", str(folder / "drafters" / "pr"), "--dtype", "float64"]
    sampling = ["--temperature", "0.8", "--seed", "3", "--max-new-tokens", "40", "--ignore-eos", "--budget", "12"]
    return ["generate", *models, "ab", "cde", "--method", "ar,eagle3.1,pr", *sampling, "--json", str(out)]


def results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_processes_write_what_one_writes(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family=family)
    done = subprocess.run([*TWO, *command(folder, tmp_path / "two.json")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plain decoding") == 2, "one of the processes shows the two answers"
    assert main(command(folder, tmp_path / "one.json")) == 0
    ours, theirs = results(tmp_path / "one.json"), results(tmp_path / "two.json")
    assert [len(r["token_ids"]) for r in theirs] == [40] * 6
    for one, two in zip(ours, theirs, strict=True):
        assert two["token_ids"] == one["token_ids"], one["method"]
        assert two["stats"]["num_cycles"] == one["stats"]["num_cycles"]


@pytest.mark.slow
def test_batches_and_budget_auto_are_as_in_one_process_and_an_error_ends_all(folder: Path, tmp_path: Path) -> None:
    """The first process fails in a pass that the other has begun, and would wait for it for ever."""
    out, settings = tmp_path / "two.json", os.environ | {"SECONDGUESS_CACHE": str(tmp_path)}
    command = [*START, str(PARTS), str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=settings)
    found = json.loads(out.read_text())
    plain = decode(load_target(str(folder / "target"), "float64"), folder / "drafters" / "pr", "ar")
    assert [len(tokens) for tokens in plain] == [6, 9, 12, 15, 18, 21]
    assert found == dict.fromkeys(METHODS, plain)
    assert done.returncode == 1
    assert "no room for this pass" in done.stderr
    assert "this process cannot go on in step with the others, and ends" in done.stderr


def test_a_line_that_ended_has_no_threads_left() -> None:
    """They end with the group, and the group with the last reference to it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    line = Line()
    line.send(b"word")
    group = weakref.ref(line.group)
    line.end()
    assert group() is None
    assert not dist.is_initialized()


def test_what_followers_are_told_has_a_method() -> None:
    assert set(WORKS) == set(get_args(Work))


def test_what_changes_a_cache_outside_a_pass_is_told_to_all() -> None:
    """``stores`` only reads, and ``write`` is called by the layers, which run in every process."""
    methods = {name for name in vars(SlotCache) if isfunction(vars(SlotCache)[name]) and not name.startswith("_")}
    changing = methods - {"stores", "write"}
    assert changing == {"release", "copy", "compact"}
    assert changing <= vars(LeaderCache).keys()
    assert changing <= set(WORKS)


class Told(Line):
    """What the others would have been told."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def send(self, said: bytes | None) -> None:
        if said is not None:
            self.words.append(said)

    def close(self) -> None:
        pass


@pytest.fixture
def leader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Leader:
    """Errors that would end the process raise SystemExit."""
    monkeypatch.setattr(spread.os, "_exit", sys.exit)
    return Leader(*read(find_files(str(folder / "target"), False, print), torch.float64), Told())


def told(leader: Leader) -> list[bytes]:
    assert isinstance(leader.line, Told)
    return leader.line.words


def test_followers_hold_what_the_first_process_holds(folder: Path, leader: Leader) -> None:
    """Both are whole here, so that their K/V are the same ones, bit for bit."""
    follower = Follower(load_target(str(folder / "target"), "float64"))
    cache = leader.new_cache(2, 16)
    leader.forward(causal_rows(torch.tensor([0]), torch.tensor([[5, 6, 7, 8]]), 0), cache)
    cache.copy(0, 1, 3)
    cache.compact(torch.tensor([1]), torch.tensor([[2]]), torch.tensor([0]), torch.tensor([1]))
    for said in told(leader):
        follower.do(said)
    for layer in range(leader.spec.num_layers):
        for ours, theirs in zip(cache.stores(layer), follower.caches[0].stores(layer), strict=True):
            assert ours[1, :, :3].all(), "it was filled"
            assert torch.equal(ours, theirs)


def test_an_error_before_the_others_know_is_an_ordinary_one(leader: Leader) -> None:
    leader._dropped.append(7)
    with pytest.raises((pickle.PicklingError, AttributeError)), leader.all_do("logits", NO_CACHE, lambda: None):
        pytest.fail("it cannot be told")
    assert not told(leader)
    with pytest.raises(SystemExit), leader.all_do("logits", NO_CACHE, 1):
        raise MemoryError("no room for this pass")
    [call] = map(pickle.loads, told(leader))
    assert call.dropped == (7,), "what was not told before is told now"
    assert not leader._dropped


def test_heads_that_cannot_be_shared_are_refused() -> None:
    config = LlamaConfig(hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    check_shares(config, 3)
    with pytest.raises(UserError, match="2 processes cannot share 9 attention heads and 3 K/V heads: start as many"):
        check_shares(config, 2)


def test_forms_of_weights_for_one_process_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="dtype 'int8' is for one process"):
        load_spread("target", "int8")
