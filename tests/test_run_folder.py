"""A run on disk: killed at any moment, held by one writer, damaged."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dead_pid import dead_pid
from killed_run import CHANGES
from secondguess.drafter.checkpoint import load_drafter
from secondguess.errors import UserError
from secondguess.lock import locked
from secondguess.train.run_folder import read_state
from tiny_run import float32_target, log_without_times, tiny_run


def same(a, b) -> bool:
    """Tensors and plain values, in dicts and lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_run.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
    whole, killed = (read_state(tmp_path / name / "resume.pt") for name in ("whole", "killed"))
    assert whole["step"] == 12
    for key in ("step", "drafter", "optimizer"):
        assert same(whole[key], killed[key]), key
    folders = (tiny_run(tmp_path, name, **CHANGES).folder for name in ("whole", "killed"))
    ours, theirs = map(log_without_times, folders)
    assert len(ours) == 6
    assert ours == theirs
    assert not list(tmp_path.rglob("*.partial"))


def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    tiny_run(tmp_path, "run", epochs=1).run()
    path = tmp_path / "run" / "resume.pt"
    whole, state, rng = path.read_bytes(), read_state(path), random.Random(0)
    refused = 0
    for _ in range(60):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        try:
            run = tiny_run(tmp_path, "run", epochs=1)
        except UserError:
            refused += 1
        else:
            assert same(dict(run.drafter.state_dict()), dict(state["drafter"]))
            assert same(run.learner.optimizer.state_dict(), state["optimizer"])
    assert refused > 40
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"^[^\n]*is damaged[^\n]*$"):
        tiny_run(tmp_path, "run", epochs=1)


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "run", epochs=1)
    with locked(run.folder.path), pytest.raises(UserError, match="another process writes in"):
        run.run()
    assert not run.folder.log_path.exists()
    run.run()
    assert run.folder.drafter.exists()


def test_every_session_leaves_its_record(tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        if step == 4:
            raise RuntimeError

    run = tiny_run(tmp_path, "run")
    with pytest.raises(RuntimeError):
        run.run(stop)
    resumed = tiny_run(tmp_path, "run")
    resumed.record = {"revision": "later", "command": "secret"}
    resumed.run()
    assert resumed.folder.records() == [{"from_step": 0}, {"from_step": 3, **resumed.record}]
    notes = json.loads((resumed.folder.drafter / "config.json").read_text())["secondguess"]["training"]
    assert notes["sessions"] == [{"from_step": 0}, {"from_step": 3, "revision": "later"}]


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "run", epochs=1)
    assert not run.finished
    run.run()
    before = {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()}
    again = tiny_run(tmp_path, "run", epochs=1)
    assert again.finished
    again.record = {"revision": "later"}
    again.run()
    assert {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()} == before
    (run.folder.drafter / "config.json").unlink()
    half = tiny_run(tmp_path, "run", epochs=1)
    half.run()
    assert half.finished


def test_places_and_how_often_it_is_looked_at_make_no_other_run(tmp_path: Path) -> None:
    tiny_run(tmp_path, "run", epochs=1).run()
    changes = {"responses": "moved.jsonl", "eval_every": 7, "save_every": 9, "eval_budget": 5, "eval_responses": 2}
    assert tiny_run(tmp_path, "run", epochs=1, **changes).finished


def test_the_drafter_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    """One that begins anew in the folder of a finished one, and is killed between its last save and its drafter."""
    tiny_run(tmp_path, "run", epochs=1).run()
    (tmp_path / "run" / "resume.pt").unlink()
    run = tiny_run(tmp_path, "run", epochs=1, lr=5e-4)

    def killed(step: int, loss: float) -> None:
        if step == run.plan.num_steps:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run.run(killed)
    resumed = tiny_run(tmp_path, "run", epochs=1, lr=5e-4)
    assert resumed.step == resumed.plan.num_steps
    assert not resumed.finished
    resumed.run()
    assert resumed.finished


def test_wall_time_counts_what_steps_do_not_and_every_session(tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        if step == 4:
            raise RuntimeError

    run = tiny_run(tmp_path, "run")
    run.began -= 100  # as if it had captured so long
    with pytest.raises(RuntimeError):
        run.run(stop)
    run = tiny_run(tmp_path, "run")
    run.began -= 100
    run.run()
    notes = json.loads((run.folder.drafter / "config.json").read_text())["secondguess"]["training"]
    assert notes["seconds"] < 100
    assert 200 <= notes["wall_seconds"] < 300
    assert 200 <= run.folder.log_lines()[-1]["wall_seconds"] < 300
    assert notes["num_processes"] == 1


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "run", epochs=1)
    whose = f"{platform.node()}.{dead_pid()}.partial"
    stale = [run.folder.path / f".resume.pt.{whose}", run.folder.path / f".drafter-latest.{whose}" / "config.json"]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    run.run()
    assert not list(run.folder.path.glob(".*.partial"))


def test_the_latest_drafter_is_that_of_the_last_save(tmp_path: Path) -> None:
    target, run = float32_target(), tiny_run(tmp_path, "run", method="pr")

    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run.run(stop)
    state = read_state(run.folder.path / "resume.pt")
    assert state["step"] == 3
    assert {path.name for path in run.folder.latest_drafter.iterdir()} == {
        "config.json", "model.safetensors", "reconsider"
    }  # fmt: skip
    latest = load_drafter(run.folder.latest_drafter, target.embedding, target.spec.num_layers)
    for name, parameter in latest.named_parameters():
        assert torch.equal(parameter, state["drafter"][name].bfloat16().float()), name
    assert not run.folder.drafter.exists()
