"""``secondguess growth``: every axis is measured, and what grows too fast is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from secondguess.bench import growth
from secondguess.bench.growth import Point, points, predicted, steeper, with_vocabulary
from secondguess.cli import main
from secondguess.config import TreeConfig
from secondguess.engine.costs import CostModel, Curve
from secondguess.testing import tiny_drafter, tiny_target
from tiny_folder import save_tiny


def test_points_stay_within_limits() -> None:
    found = points(Point(24, 1, 256, 4096), longest=1000, target_vocabulary=5000)
    assert [p.context for p in found["context"]] == [128, 512]
    assert [p.vocabulary for p in found["vocabulary"]] == [1024, 2048, 4096]
    assert {(p.budget, p.context, p.vocabulary) for p in found["batch"]} == {(24, 256, 4096)}


def test_prediction_by_hand() -> None:
    """Two requests: start 2 ms, 3 steps of 4 rows each at 1 ms a row, 2 trees of 6 rows at half a millisecond a row."""
    line = Curve((1, 100), (0.001, 0.1))
    costs = CostModel((1,), (Curve((1, 100), (0.0005, 0.05)),), Curve((1, 2), (0.001, 0.002)), line)
    tree = TreeConfig(budget=5, num_steps=4, grow_width=2, num_reconsider=0)
    assert predicted(costs, tree, Point(5, 2, 0, 0)) == pytest.approx(2 + 3 * 4 + 6)
    late = replace(costs, context=100, context_curve=Curve((1, 6), (0.0, 0.00001)))
    assert predicted(late, tree, Point(5, 2, 600, 0)) == pytest.approx(2 + 3 * 4 + 6 + 2 * 500 * 0.01)


def test_what_is_more_than_linear() -> None:
    assert not steeper([(1, 10.0), (2, 11.0), (4, 13.0), (8, 17.0)])
    assert steeper([(1, 10.0), (2, 11.0), (4, 16.0), (8, 60.0)])
    assert not steeper([(1, 10.0), (8, 60.0)])


def test_another_vocabulary_has_the_same_block() -> None:
    drafter = tiny_drafter(tiny_target("llama"))
    larger = with_vocabulary(drafter, 50)
    assert larger.target_ids.tolist() == list(range(50))
    assert torch.equal(larger.lm_head.weight[32:50], drafter.lm_head.weight[:18])
    assert torch.equal(larger.fc.weight, drafter.fc.weight)


def test_the_command(tmp_path: Path, monkeypatch, capsys, caplog) -> None:
    save_tiny(tmp_path)
    config = tmp_path / "drafters" / "pr" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    axes = {"budget": (4, 24), "batch": (1, 2), "context": (128, 512), "vocabulary": (64, 128)}
    monkeypatch.setattr(growth, "AXES", axes)
    command = ["growth", "target", "--drafter", "drafters/pr", "--json", "out.json", "--out", "figures"]
    assert main(command) == 0
    rows = json.loads(Path("out.json").read_text())["rows"]
    assert [(r["axis"], r["value"]) for r in rows] == [(axis, v) for axis, values in axes.items() for v in values]
    assert all(r["cycle_ms"] > 0 and r["predicted_ms"] > 0 for r in rows)
    assert Path("figures/growth.png").stat().st_size > 10_000
    assert "cost model" in " ".join(capsys.readouterr().out.split())
    assert caplog.text.count("positions: made for 64, the target takes 1024") == 1
