"""The pipeline for lent machines, on the CPU with a tiny target: in pieces, interrupted, and gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from secondguess.cli import parser_of
from secondguess.train.config import load_config
from tiny_folder import save_tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_pipeline.sh"
TRAIN = "epochs=1 batch_size=4 draft_vocab_size=64 unroll_steps=2 eval_every=100 held_out=0.2"


def call(folder: Path, seconds: int = 500, **more: str) -> subprocess.CompletedProcess[str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME")}
    ours = {"PYTHON": sys.executable, "STATE": str(folder / "state"), "SECONDGUESS_CACHE": str(folder / "cache")}
    sizes = {"LIMIT": "12", "NEW_TOKENS": "12", "BATCH": "4", "TRAIN": TRAIN}
    command = [str(SCRIPT), str(folder / "carried"), str(folder / "out"), str(seconds)]
    return subprocess.run(command, env=keep | ours | sizes | more, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path)
    for name, count in (("prompts", 14), ("tasks", 2)):
        (tmp_path / "carried" / name).mkdir(parents=True)
        rows = [{"id": f"{name}/{i}", "benchmark": "x", "turns": [f"{name} {i}"]} for i in range(count)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "carried" / name / "some.jsonl").write_text(lines)
    return tmp_path


def test_a_target_that_comes_in_pieces(folder: Path) -> None:
    data, carried = os.urandom(1000), folder / "carried"
    (carried / "target.gguf.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  target.gguf\n")
    (carried / "target.gguf.part-aa").write_bytes(data[:600])
    first = call(folder)
    assert first.returncode == 0, first.stderr
    assert "in part: 600 bytes so far" in first.stdout
    (carried / "target.gguf.part-aa").unlink()
    (carried / "target.gguf.part-ab").write_bytes(data[600:])
    second = call(folder)
    assert "target: 1000 bytes" in second.stdout
    assert (folder / "state" / "target.gguf").read_bytes() == data
    assert second.returncode == 2  # it is no model


STUB = """#!/bin/sh
printf '%s\\t' "$@" >> {called}
echo >> {called}
"""


def test_every_command_of_it_is_one_that_there_is(folder: Path) -> None:
    """With a Python that does nothing but tell what it was asked to do."""
    called, stub = folder / "called", folder / "python"
    stub.write_text(STUB.format(called=called))
    stub.chmod(0o755)
    done = call(folder, PYTHON=str(stub), TARGET="target", TRAIN="")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rstrip("\t").split("\t") for line in called.read_text().splitlines()]
    runs = [argv[2:] for argv in lines if argv[:2] == ["-m", "secondguess"]]
    assert [name for name, *_ in runs] == ["prepare", "train", "train", "eval", "eval"]
    for name, *argv in runs:
        parser_of(name)[0].parse(argv)
    eagle, pr = (load_config(Path(argv[2]), argv[3:]) for argv in runs if argv[0] == "train")
    assert (eagle.method, eagle.warm_start) == ("eagle3.1", "none")
    assert (pr.method, pr.warm_start) == ("pr", f"{folder}/state/eagle3.1/drafter")
    assert eagle.responses == pr.responses == f"{folder}/state/answers.jsonl"
    assert {eagle.epochs, pr.epochs} == {6}


@pytest.mark.slow
def test_from_prompts_to_measured_drafters(folder: Path) -> None:
    target = {"TARGET": str(folder / "target")}
    nothing = call(folder, 10, **target)
    assert nothing.returncode == 0, nothing.stderr
    assert "answers: no time left in this call" in nothing.stdout
    done = call(folder, **target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all done" in done.stdout
    out = folder / "out"
    assert {path.name for path in out.iterdir()} == {
        "progress.txt", "answers.safetensors", "eagle3.1.safetensors", "pr.safetensors", "results.tar.gz",
    }  # fmt: skip
    with tarfile.open(out / "results.tar.gz") as tar:
        names = set(tar.getnames())
    assert {"./eval-pr.json", "./eval-eagle3.1.json", "./pr/log.jsonl", "./pr/drafter/config.json"} <= names
    assert "./answers.jsonl" not in names
    again = call(folder, **target)
    assert "all done" in again.stdout
    assert "unfinished" not in again.stdout
