"""Training makes its tensors where it computes. (``test_graphs`` looks at decoding.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secondguess.device import choose_device, upload
from secondguess.errors import UserError
from tiny_run import tiny_run
from waits import Homeless, Waits

SENT_ON = {"train/feed.py", "train/second.py"}  # made on the CPU, and sent to the device in the same line


@pytest.mark.parametrize("settings", [{"method": "eagle3.1"}, {"method": "pr"}, {"method": "pr", "carry": "merge"}])
def test_a_training_step_makes_nothing_on_the_cpu(settings: dict, tmp_path: Path) -> None:
    trainer = tiny_run(tmp_path, "run", **settings)
    with Homeless() as homeless:
        trainer.train_step(trainer.training[:4])
        trainer.judge.losses(trainer.drafter, trainer.learner)
    assert {place.split(":")[0] for place in homeless.places} <= SENT_ON


@pytest.mark.parametrize("settings", [{"method": "eagle3.1"}, {"method": "pr", "num_layers": 2}])
def test_a_training_step_waits_for_the_device_a_few_times(settings: dict, tmp_path: Path) -> None:
    """Where rows begin and end is asked once for all layers, at each level of each unroll step; sums stay there."""
    trainer = tiny_run(tmp_path, "run", **settings)
    with Waits() as waits:
        trainer.train_step(trainer.training[:4])
    levels = 2 if settings["method"] == "pr" else 1
    assert len(waits.places) <= 5 + 2 * levels * trainer.config.unroll_steps, waits.places


def test_devices_by_name(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="finds no GPU here"):
        choose_device("cuda")
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:2")
    assert choose_device("cuda:1") == torch.device("cuda:1")


def test_numbers_go_up_as_they_are() -> None:
    assert torch.equal(upload([[1, 2], [3, 4]], "cpu"), torch.tensor([[1, 2], [3, 4]]))
