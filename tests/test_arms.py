"""``scripts/arms.py``: arms trained on the same data, and compared in one run."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from secondguess.config import TreeConfig
from secondguess.methods import parse_method
from secondguess.train.config import load_config
from tiny_folder import tiny_workload

SCRIPT = Path(__file__).parent.parent / "scripts" / "arms.py"
CONFIG = SCRIPT.parent.parent / "configs" / "arms.yaml"


@pytest.mark.slow
def test_arms_are_trained_and_compared_over_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target, *tasks = tiny_workload(tmp_path, monkeypatch)
    rng = random.Random(0)
    rows = [{"id": f"r{i}", "prompt_len": 3, "input_ids": [rng.randrange(257) for _ in range(12)]} for i in range(12)]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"target": target, "responses": "answers.jsonl", "draft_vocab_size": 32, "epochs": 1, "batch_size": 4}
    arms = {
        "eagle": {"method": "eagle3.1"},
        "ours": {"method": "pr", "carry": False, "lens": True, "draft": ["pr:m=1", "pr:m=0"]},
    }
    Path("arms.yaml").write_text(yaml.safe_dump({"train": train | {"eval_responses": 0}, "arms": arms}))
    flags = [*tasks[: tasks.index("--drafter")], "--budget", "4"]
    subprocess.run([sys.executable, str(SCRIPT), "arms.yaml", "out", *flags], check=True, env=os.environ)
    compared = json.loads(Path("out/eval.json").read_text())["rows"]
    of_all = [row for row in compared if row["task"] == "all tasks"]
    assert [row["method"] for row in of_all] == [
        "eagle3.1:drafter=out/eagle/drafter",
        "pr:m=1,drafter=out/ours/drafter",
        "pr:m=0,drafter=out/ours/drafter",
    ]
    assert yaml.safe_load(Path("out/ours/run.yaml").read_text())["carry"] == "off"


def test_the_arms_that_come_along_are_settings_that_there_are(tmp_path: Path) -> None:
    spec = yaml.safe_load(CONFIG.read_text())
    arms = runpy.run_path(str(SCRIPT))
    for name, arm in spec["arms"].items():
        assert load_config(None, arms["settings"](tmp_path, name, spec["train"], arm)).method == arm["method"]
        for typed in arms["methods"](tmp_path, name, arm):
            assert parse_method(typed, TreeConfig()).name in (arm["method"], "pr")


def test_arms_mean_what_they_say_whatever_the_defaults_are() -> None:
    """Every arm with second looks names what the defaults were changed in since."""
    arms = yaml.safe_load(CONFIG.read_text())["arms"]
    looking = {name: arm for name, arm in arms.items() if "pr" in arm["method"]}
    assert len(looking) > 10
    assert all({"carry", "shared_loss", "lens"} <= arm.keys() for arm in looking.values())
    assert arms["floor"] == arms["paper"] | {"balance_weight": 0.1}


MINE = "train: {responses: r}\narms:\n  a: {method: eagle3.1}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("", "must have train and arms"),
        ("train: {target: t}\narms: {a: {}}", "arm a needs a method"),
        ("train: {target: t, responses: r}\narms: {a: {method: pr, bogus: 1}}", "unknown setting 'bogus'"),
        (MINE + "  'b,c': {method: pr}", "arm b,c: a comma"),
        (MINE + "  b: {method: pr, target: other}", "several targets (other, smollm2-135m)"),
        (MINE + "  b: {method: pr, draft: 'pr:merg=max'}", "did you mean merge?"),
        (MINE, "no task 'gsm9k'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "arms.yaml"
    if text is not None:
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path), str(tmp_path / "out"), "--tasks", "gsm9k"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()
    assert said in done.stderr
    assert "Traceback" not in done.stderr
