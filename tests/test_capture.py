"""Captured states: made ahead, made on the way, and what keeps them from being made."""

from __future__ import annotations

import json
import platform
import random
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dead_pid import dead_pid
from secondguess.capture import store as capture_store
from secondguess.capture.run import capture, fill, plan_capture
from secondguess.capture.source import Live
from secondguess.cli import main
from secondguess.errors import UserError
from secondguess.lock import locked
from secondguess.train.data import Response, check_lengths
from secondguess.train.trainer import Trainer
from tiny_folder import save_tiny
from tiny_run import float32_target, log_without_times, tiny_config, tiny_responses, tiny_run

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")) / "target")


def write_responses(path: Path, lengths: list[int]) -> str:
    rng = random.Random(0)
    rows = [
        {"id": f"r{i}", "prompt_len": 3, "input_ids": [rng.randrange(1, 257) for _ in range(n)]}
        for i, n in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_captured_ahead_is_what_training_finds(target_folder: str, tmp_path: Path, capsys) -> None:
    responses = write_responses(tmp_path / "r.jsonl", [12] * 20)
    command = ["capture", target_folder, responses, "--captures", str(tmp_path / "c")]
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "c").exists()
    assert "1 of 1 shards missing" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--json", str(tmp_path / "made.json")]) == 0
    [row] = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert (row["sequences"], row["tokens"], row["shards"], row["missing"]) == (20, 240, 1, 0)
    settings = [f"target={target_folder}", f"responses={responses}", f"captures={tmp_path / 'c'}"]
    more = ["draft_vocab_size=64", "batch_size=4", "unroll_steps=2", f"out={tmp_path / 'run'}"]
    assert main(["train", "--dry-run", *settings, *more]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert f"states of 240 tokens in {row['folder']}: complete" in shown
    assert "s a step, measured on one batch" in shown
    assert not (tmp_path / "run").exists()


def test_no_room_is_found_out_first(target_folder: str, tmp_path: Path, monkeypatch, capsys) -> None:
    responses = write_responses(tmp_path / "r.jsonl", [12] * 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 240 * (8 * 32 + 4) - 1))
    assert main(["capture", target_folder, responses, "--captures", str(tmp_path / "c")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "has room for" in error
    assert "captures=none" in error
    assert not (tmp_path / "c").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 240 * (8 * 32 + 4)))
    assert main(["capture", target_folder, responses, "--captures", str(tmp_path / "c"), "--dry-run"]) == 0


def test_a_response_longer_than_the_context_is_named(target_folder: str, tmp_path: Path, capsys) -> None:
    responses = write_responses(tmp_path / "r.jsonl", [12] * 3 + [1025] + [12] * 3)
    assert main(["capture", target_folder, responses, "--captures", str(tmp_path / "c")]) == 2
    assert "response r3 has 1025 tokens, the target's context holds 1024" in capsys.readouterr().err
    check_lengths([Response("fits", (1,) * 1024, 3)], 1024)


def test_a_killed_capture_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(capture_store, "SHARD_TOKENS", 40)
    target, sequences = float32_target(), [r.input_ids for r in tiny_responses()]
    whole = capture(target, sequences, tmp_path / "whole")
    assert len(whole.shards) > 4
    store, told = plan_capture(target, sequences, tmp_path / "killed"), 0

    def kill(tokens: int) -> None:
        nonlocal told
        told += tokens
        if told > 100:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill(store, Live(target, sequences), "tiny", kill)
    missing = store.missing
    assert missing
    assert store.shards
    (store.folder / f".states-00004.safetensors.{platform.node()}.{dead_pid()}.partial").write_bytes(b"half")
    again = plan_capture(target, sequences, tmp_path / "killed")
    done: list[int] = []
    with locked(again.folder):
        fill(again, Live(target, sequences), "tiny", done.append)
    assert sum(done) == again.tokens(missing)
    assert not list(again.folder.glob("*.partial"))
    for i in range(len(sequences)):
        assert torch.equal(again[i].hidden_TKH, whole[i].hidden_TKH)
        assert torch.equal(again[i].best_T, whole[i].best_T)


def test_data_that_has_grown_has_its_old_states(tmp_path: Path) -> None:
    """Wherever the new sequences stand, and however many tokens a shard held."""
    target, sequences = float32_target(), [r.input_ids for r in tiny_responses()]
    old = capture(target, sequences[::2], tmp_path)
    [shard] = old.shards
    before = shard.read_bytes()
    grown, done = plan_capture(target, [*sequences, sequences[5]], tmp_path), list[int]()
    assert grown.folder == old.folder
    assert grown.missing == [[*range(1, 24, 2)]], "what returns is made once"
    fill(grown, Live(target, sequences), "tiny", done.append)
    assert sum(done) == sum(map(len, sequences[1::2]))
    assert not grown.missing
    assert len(grown.shards) == 2
    assert shard.read_bytes() == before
    for i, theirs in enumerate(Live(target, sequences).read(range(24))):
        assert torch.equal(grown[i].hidden_TKH, theirs.hidden_TKH)
    assert torch.equal(grown[24].best_T, grown[5].best_T)


@pytest.mark.parametrize("lost", [(), (1, 3)])
def test_captures_of_the_form_before_are_read(tmp_path: Path, monkeypatch, lost: tuple[int, ...]) -> None:
    """A folder for a list of sequences, shards by number, and nothing in them that says whose states they hold."""
    monkeypatch.setattr(capture_store, "FORMER_SHARD_TOKENS", 40)
    target, sequences = float32_target(), [r.input_ids for r in tiny_responses()]
    folder = tmp_path / capture_store.former_name(target.fingerprint, sequences)
    folder.mkdir()
    shards = capture_store.plan_shards([*map(len, sequences)], 40)
    assert len(shards) > 4
    for number, shard in enumerate(shards):
        states = Live(target, sequences).read(shard)
        tensors = {"hidden": torch.cat([s.hidden_TKH for s in states]), "best": torch.cat([s.best_T for s in states])}
        if number not in lost:
            save_file(tensors, folder / f"states-{number:05d}.safetensors")
    store = plan_capture(target, sequences, tmp_path)
    assert [i for shard in store.missing for i in shard] == [i for number in lost for i in shards[number]]
    fill(store, Live(target, sequences), "tiny", lambda n: None)
    assert not store.missing
    for i, theirs in enumerate(Live(target, sequences).read(range(24))):
        assert torch.equal(store[i].hidden_TKH, theirs.hidden_TKH)
        assert torch.equal(store[i].best_T, theirs.best_T)
    assert plan_capture(target, sequences[:-1], tmp_path / "other").missing, (
        "of another list it is not known what is where"
    )


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    target, sequences = float32_target(), [r.input_ids for r in tiny_responses()]
    [shard] = capture(target, sequences, tmp_path).shards
    shard.write_bytes(shard.read_bytes()[:9])
    with pytest.raises(UserError, match=rf"{shard.name} is damaged .*remove it"):
        _ = plan_capture(target, sequences, tmp_path).missing


def test_states_made_on_the_way_are_those_of_the_shards(tmp_path: Path) -> None:
    target, sequences = float32_target(), [r.input_ids for r in tiny_responses()]
    store, live = capture(target, sequences, tmp_path), Live(target, sequences)
    picked = [7, 2, 19, 11]
    for ours, theirs in zip(live.read(picked), store.read(picked), strict=True):
        assert torch.equal(ours.hidden_TKH, theirs.hidden_TKH)
        assert torch.equal(ours.best_T, theirs.best_T)


def test_training_without_captures_is_training_with_them(tmp_path: Path) -> None:
    captured = tiny_run(tmp_path, "captured", method="pr")
    captured.run()
    target, responses = float32_target(), tiny_responses()
    config = tiny_config(tmp_path / "live", method="pr", captures="none")
    live = Trainer(config, target, responses, Live(target, [r.input_ids for r in responses]))
    live.run()
    assert log_without_times(live.folder) == log_without_times(captured.folder)
    for name, parameter in captured.drafter.named_parameters():
        assert torch.equal(parameter, dict(live.drafter.named_parameters())[name]), name


def test_one_writer_per_folder(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another process writes in")
    with locked(tmp_path / "a"), locked(tmp_path / "b"), refused, locked(tmp_path / "a"):
        pass
    with locked(tmp_path / "a"):
        pass


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "2", "--endpoint", "http://localhost"], "give --endpoint or --workers"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--workers", "2"], "say with --worker-gpus how many GPUs each takes"),
        (["--worker-gpus", "1"], "--worker-gpus is for --workers"),
        (["--shared-storage", "states"], "--shared-storage is for --endpoint"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], said: str, capsys) -> None:
    assert main(["capture", "target", "r.jsonl", *flags]) == 2
    assert said in capsys.readouterr().err


def test_workers_are_told_what_holds_on_any_machine(
    target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the module that needs Ray."""
    told = list[Any]()
    workers: Any = ModuleType("secondguess.integrations.ray_capture")
    workers.Task = lambda **task: task
    workers.fill_with_workers = lambda task, num_workers, on_tokens: told.append((task, num_workers))
    monkeypatch.setitem(sys.modules, workers.__name__, workers)
    monkeypatch.setattr("secondguess.commands.capture.find_spec", lambda name: name)
    monkeypatch.chdir(Path(target_folder).parent)
    responses = write_responses(tmp_path / "r.jsonl", [12] * 20)
    flags = ["--captures", "c", "--workers", "2", "--device", "cpu", "--precision", "auto"]
    assert main(["capture", Path(target_folder).name, responses, *flags]) == 0
    [(task, num_workers)] = told
    assert (task["shards"], num_workers) == ([[*range(20)]], 2)
    assert task["target"] == str(Path(target_folder).resolve())
    assert task["captures"] == (Path(target_folder).parent / "c").resolve()
    assert (task["device"], task["gpus"]) == ("cpu", 0)
    assert task["precision"] in ("float32", "bfloat16"), "the same everywhere: shards are named by it"
