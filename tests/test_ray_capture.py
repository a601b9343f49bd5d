"""Shards made by workers of a Ray cluster are those of this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

from secondguess.capture.run import capture
from secondguess.cli import main
from secondguess.target.load import load_target
from test_capture import write_responses
from tiny_folder import save_tiny


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_make_the_shards_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # on a cluster of its own
    folder = save_tiny(tmp_path)
    responses = write_responses(tmp_path / "r.jsonl", [1000] * 150)
    flags = ["--captures", str(tmp_path / "many"), "--precision", "float32", "--device", "cpu", "--workers", "2"]
    assert main(["capture", str(folder / "target"), responses, *flags, "--json", str(tmp_path / "made.json")]) == 0
    [row] = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert (row["missing"], row["shards"]) == (0, 3)
    sequences = [tuple(json.loads(line)["input_ids"]) for line in Path(responses).read_text().splitlines()]
    alone = capture(load_target(str(folder / "target")), sequences, tmp_path / "one")
    ours = capture(load_target(str(folder / "target")), sequences, tmp_path / "many")
    for i in range(len(sequences)):
        assert torch.equal(ours[i].hidden_TKH, alone[i].hidden_TKH)
