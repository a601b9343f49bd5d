"""``secondguess train`` from data to a drafter that serves, on a tiny target."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from secondguess.cli import main
from secondguess.commands.train_run import describe_shared_loss, interrupt_between_steps
from secondguess.train.trainer import Trainer
from tiny_folder import save_tiny
from tiny_run import tiny_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tiny: Path, tmp_path: Path) -> list[str]:
    rng = random.Random(0)
    rows = [
        {"id": f"r{i}", "prompt_len": 3, "input_ids": [rng.randrange(257) for _ in range(rng.randrange(5, 16))]}
        for i in range(20)
    ]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "target": str(tiny / "target"), "responses": str(tmp_path / "responses.jsonl"), "out": str(tmp_path / "run"),
        "captures": str(tmp_path / "captures"), "draft_vocab_size": 64, "epochs": 2, "batch_size": 4,
        "eval_every": 3, "held_out": 0.2, "unroll_steps": 2,
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    return ["train", "--config", str(tmp_path / "train.yaml")]


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_train_then_generate(settings, tiny: Path, tmp_path: Path, capsys) -> None:
    assert main([*settings, "--json", str(tmp_path / "log.json")]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "level 0: held-out loss" in shown
    assert "level 1: held-out loss" in shown
    assert "held-out tau" in shown
    assert "shared_loss=auto: level0" in shown
    result = json.loads((tmp_path / "log.json").read_text())
    assert result["record"].keys() == {"command", "revision", "versions", "machine", "time", "num_processes"}
    assert result["rows"][0]["step"] == 3
    assert result["rows"][-1]["step"] == result["rows"][-1]["of"]
    run = tmp_path / "run"
    assert json.loads((run / "record.json").read_text()) == [{"from_step": 0, **result["record"]}]
    training = json.loads((run / "drafter" / "config.json").read_text())["secondguess"]["training"]
    assert training["settings"]["shared_loss"] == "level0", "what auto came to"
    assert "responses" not in training["settings"], "a place"
    assert training["num_responses"] < 20
    assert {path.name for path in run.iterdir()} == {
        ".lock", "run.yaml", "record.json", "log.jsonl", "curves.png", "resume.pt", "drafter-latest", "drafter"
    }  # fmt: skip
    assert not [path for path in files(tmp_path) if "partial" in path.name]
    command = ["generate", str(tiny / "target"), "ab", "--drafter", str(run / "drafter"), "--method", "ar,pr"]
    assert main([*command, "--max-tokens", "8", "--json", str(tmp_path / "out.json")]) == 0
    plain, pr = json.loads((tmp_path / "out.json").read_text())["results"]
    assert plain["token_ids"] == pr["token_ids"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "shared_loss=auto: level0, "),
        ({"carry": "half", "attach": 0.5}, "shared_loss=auto: both, because of carry=half and attach=0.5\n"),
        ({"query_slot": "own_token", "lens": False}, "both, because of level 1 without weights of its own\n"),
        ({"parallel": "shard"}, "warning: parallel=shard makes it another recipe, shared_loss=auto is both and not "),
        ({"parallel": "shard", "carry": "half"}, "auto: both, because of carry=half and parallel=shard\n"),
    ],
)
def test_what_auto_came_to_is_said_with_the_reason(tmp_path: Path, changes: dict, said: str) -> None:
    assert said in describe_shared_loss(tiny_config(tmp_path, **changes))


def test_where_nothing_is_chosen_nothing_is_said(tmp_path: Path) -> None:
    for changes in ({"method": "eagle3.1"}, {"shared_loss": "both", "parallel": "shard"}):
        assert describe_shared_loss(tiny_config(tmp_path, **changes)) == ""


SLOW_CAPTURE = """
import sys, time
from secondguess.cli import main
from secondguess.train.setup import Captures

fill = Captures.fill
Captures.fill = lambda *args: (time.sleep(2), fill(*args))
sys.exit(main())
"""


@pytest.mark.timeout(200)
def test_torchrun_trains_with_two_processes(settings, tmp_path: Path) -> None:
    """The first one captures what both read, for which the other waits, and writes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "slow.py").write_text(SLOW_CAPTURE)
    command = [*torchrun, str(tmp_path / "slow.py"), *settings, "device=cpu", "epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    run, [shard] = tmp_path / "run", (tmp_path / "captures").rglob("*.safetensors")
    assert shard.stat().st_size > 0
    assert "products on cpu, 2 processes" in done.stderr
    assert done.stderr.count("drafter written to") == 1
    [session] = json.loads((run / "record.json").read_text())
    assert session["num_processes"] == 2
    training = json.loads((run / "drafter" / "config.json").read_text())["secondguess"]["training"]
    assert (training["num_processes"], training["steps"]) == (2, 3)


def test_what_may_not_fit_of_an_anchor_is_told(settings, tiny: Path, tmp_path: Path, caplog) -> None:
    start, anchor = tiny / "drafters" / "pr", shutil.copytree(tiny / "drafters" / "pr", tmp_path / "anchor")
    config = json.loads((anchor / "config.json").read_text()) | {"max_position_embeddings": 64}
    (anchor / "config.json").write_text(json.dumps(config))
    changes = [f"warm_start={start}", f"anchor_to={anchor}", "draft_vocab_size=128", "method=pr", "balance=anchor"]
    assert main([*settings, *changes, "balance_weight=0.5", "--dry-run"]) == 0
    assert caplog.text.count("positions: made for 64, the target takes 1024") == 1


def test_run_yaml_is_the_run(settings, tmp_path: Path, capsys) -> None:
    assert main([*settings, "epochs=1"]) == 0
    written = (tmp_path / "run" / "run.yaml").read_text()
    capsys.readouterr()
    assert main([*settings, "epochs=1", "--print-config"]) == 0
    assert capsys.readouterr().out == written


def test_dry_run_touches_nothing(settings, tmp_path: Path, capsys) -> None:
    before = files(tmp_path)
    assert main([*settings, "--dry-run"]) == 0
    assert files(tmp_path) == before
    assert "1 of 1 shards missing" in " ".join(capsys.readouterr().err.split())


def test_without_captures_nothing_is_captured(settings, tmp_path: Path, capsys) -> None:
    assert main([*settings, "captures=none", "epochs=1"]) == 0
    assert "no captures" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "captures").exists()
    assert (tmp_path / "run" / "drafter" / "config.json").exists()


def test_a_run_that_diverges_fails_in_one_line(settings, tmp_path: Path, capsys) -> None:
    assert main([*settings, "lr=1e38", "warmup=0"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("secondguess: Diverged: the ")
    assert "at step 2: nothing is exported" in error
    assert not (tmp_path / "run" / "drafter").exists()


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("lr=[1", "not YAML"),
        ("lr=nan", "lr"),
        ("out=FILE/x", "is a file"),
        ("captures=FILE", "is a file"),
        ("accumulate=0", "accumulate"),
        ("eval_budget=0", "eval_budget"),
        ("warm_start=nowhere", "no drafter 'nowhere'"),
        ("parallel=shard", "torchrun"),
        ("parallel=split", "one of replicate, shard"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(settings, tmp_path: Path, capsys, override: str, word: str) -> None:
    (tmp_path / "file").write_text("")
    assert main([*settings, override.replace("FILE", str(tmp_path / "file"))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("secondguess: ")
    assert word in error
    assert error.count("\n") == 1


def test_help_lists_the_settings(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "weight of the balance term (beta); default: 0.0" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(settings, tmp_path: Path, monkeypatch, capsys) -> None:
    whole = Trainer.train_step

    def interrupted(self: Trainer, indices: list[int]):
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return whole(self, indices)

    with monkeypatch.context() as m:
        m.setattr(Trainer, "train_step", interrupted)
        assert main(settings) == 130
    assert "2 steps are kept in" in capsys.readouterr().err
    assert main(settings) == 0
    assert "continuing at step 2" in capsys.readouterr().err
    assert (tmp_path / "run" / "drafter" / "config.json").exists()


@pytest.fixture
def interruptible():
    """As in a terminal: a job in a shell's background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_waits_for_the_step_to_end(interruptible) -> None:
    with interrupt_between_steps() as check:
        check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
