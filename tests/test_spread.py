"""A target that torchrun spreads over two processes writes what it writes in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from secondguess.cli import main
from secondguess.errors import UserError
from secondguess.target.spread import check_shares, load_spread
from tiny_folder import save_tiny

TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "secondguess")


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
