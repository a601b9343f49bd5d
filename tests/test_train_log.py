"""What a run says of itself: counted work, measured speed, curves, trackers."""

from __future__ import annotations

import importlib
import math
import mmap
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from secondguess.commands.curves import draw, save_curves
from secondguess.commands.train_run import held_out_lines
from secondguess.config import DrafterConfig
from secondguess.errors import UserError, install
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.config import TrainConfig
from secondguess.train.flops import forward_flops, matmul_peak, step_flops
from secondguess.train.flops import unrolled as rows_and_keys
from secondguess.train.learner import Done
from secondguess.train.memory import Memory
from secondguess.train.meter import Window
from secondguess.train.tally import Tally
from secondguess.train.track import Hosted, check_tracker, open_tracker, scalars
from tiny_run import tiny_config
from unrolling import EVERY_ROW, random_batch, unrolled

SHAPE = DrafterConfig(
    hidden_size=10, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=3, vocab_size=100,
    draft_vocab_size=50, target_hidden_size=10, target_num_layers=8,
)  # fmt: skip


def test_flops_of_the_worked_example() -> None:
    """Six tokens, two of them prompt, as in ``batch``: 3 rows over 4 keys, then 2 rows over 3."""
    assert list(rows_and_keys(6, 2, 9)) == [(3, 4), (2, 3), (1, 2)]
    fuse, project = 2 * 30 * 10, 2 * 20 * (12 + 6 + 6)
    look = 2 * 12 * 10 + 3 * 2 * 10 * 20 + 2 * 10 * 50  # output projection, feed-forward, head
    step0 = 3 * (look + 2 * 2 * 12 * 4)
    step1 = 2 * (look + 2 * 2 * 12 * 3 + project)
    assert forward_flops(SHAPE, 6, 2, 2, 0) == (6 * (fuse + project) + step0 + step1, 0)
    second = 3 * (look + 2 * 2 * 12 * 4 + project) + 2 * (look + 2 * 2 * 12 * 3 + project)
    once = forward_flops(SHAPE, 6, 2, 2, 1)
    assert once == (6 * (fuse + project) + step0 + step1, second)
    targets = 6 * 2 * 10 * 50
    assert step_flops(SHAPE, [(6, 2), (6, 2)], 2, 1) == 2 * (3 * sum(once) + targets)
    assert step_flops(SHAPE, [(6, 2)], 2, 1, "level0") == 3 * once[0] + 2 * once[1] + targets
    assert step_flops(SHAPE, [(6, 2)], 2, 1, "none") == once[0] + 2 * once[1] + targets


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("rho", [0, 1])
def test_flops_are_those_that_torch_counts(rho: float, num_layers: int) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, num_layers=num_layers)
    batch = random_batch(target, drafter, lengths=(9, 5), starts=(3, 2), offered=1)
    with FlopCounterMode(display=False) as counter:
        unrolled(drafter, batch, 4, EVERY_ROW if rho else None)
    drafting = sum(sum(forward_flops(drafter.config, n, start, 4, rho)) for n, start in ((9, 3), (5, 2)))
    targets = 2 * batch.hidden_TH.numel() * len(batch.head_VH)
    assert counter.get_total_flops() == drafting + targets


DEFAULT = replace(
    SHAPE, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    draft_vocab_size=4096, target_hidden_size=576, target_num_layers=30,
)  # fmt: skip


@pytest.mark.parametrize("shared_loss", ["both", "level0", "none"])
@pytest.mark.parametrize("rho", [0.25, 0.5, 1.0])
def test_second_looks_on_a_share_of_the_rows_cost_no_more_than_it(rho: float, shared_loss: str) -> None:
    """Of the default target's drafter. The lens, which the paper has not, costs at most a tenth of a second look."""
    for text in ((60, 40), (300, 40), (2048, 48)):
        alone = step_flops(DEFAULT, [text], 3, 0)
        extra = step_flops(DEFAULT, [text], 3, rho, shared_loss) / alone - 1
        with_lens = step_flops(replace(DEFAULT, lens=True), [text], 3, rho, shared_loss) / alone - 1
        assert extra < with_lens < extra + 0.1 * rho
        assert extra < rho
        if shared_loss == "both":
            assert extra > 0.6 * rho


def test_the_peak_is_measured_once_and_quickly() -> None:
    state = torch.random.get_rng_state()
    peak = matmul_peak(torch.float32, torch.device("cpu"))
    assert 1e8 < peak < 1e15
    assert matmul_peak(torch.float32, torch.device("cpu")) == peak
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_window_sums_steps_and_survives_its_state() -> None:
    window = Window()
    for norm in (1.0, 3.0):
        tally = Tally([6.0, 4.0], [12.0, 6.0], [3.0, 1.0], [6.0, 4.0], [6.0, 4.0], [3.0, 1.0], [0.0, 0.0], [0.0, 0.0])
        window.add(Done(tally.sums(5), 6.0, 1.0, norm, 2 * norm), seconds=2.0, flops=50.0)
        window = Window.of(window.state(), 5)
    summary = window.summary()
    assert (summary["grad_norm"], summary["largest_grad_norm"]) == (2.0, 3.0)
    assert (summary["level1_grad_norm"], summary["largest_level1_grad_norm"]) == (4.0, 6.0)
    assert (summary["tokens"], summary["rows"]) == (12, 20)
    assert summary["train"]["loss0"] == [2.0, 1.5]
    speed = window.speed(peak=100.0)
    assert speed["tokens_per_second"] == 3
    assert speed["rows_per_second"] == 10
    assert speed["share_of_peak"] == 0.25


def test_sums_are_those_of_their_tally() -> None:
    """Unroll steps that no row came to are left out, numbers that a method has not are 0."""
    tally = Tally(rows=[2.0, 0.0, 1.0], loss0=[1.0, 0.0, 3.0], right0=[1.0, 0.0, 1.0])
    assert Tally.of(tally.sums(4) + tally.sums(4)).summary() == {"loss0": [0.5, 0.0, 3.0], "top1_0": [0.5, 0.0, 1.0]}
    assert Tally.of(Tally().sums(3)) == Tally()


def test_the_memory_of_a_step_is_not_the_process_s() -> None:
    memory = Memory(torch.device("cpu"))
    before = torch.ones(25_000_000)  # 100 MB
    for size in (4, 60_000_000, 4):
        with memory.of_a_step():
            # Straight from the system: malloc may have as much left over from tests before.
            np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8).fill(1)
    after = torch.ones(50_000_000)
    found = memory.summary()
    assert 0.03 < found["step_memory_gb"] < 0.15
    assert found["peak_memory_gb"] > found["step_memory_gb"] + 4e-9 * (len(before) + len(after))


LINE = {
    "step": 4, "of": 12, "seconds": 1.5, "lr": 0.1, "train": {"loss0": [2.0, 2.5]}, "grad_norm": 0.5,
    "held_out": {"loss0": [3.0, 3.25], "top1_0": [0.5, 0.25], "loss1": [2.0, 2.5], "top1_1": [0.75, 0.5]},
    "held_out_tau": 2.314, "held_out_tau_m0": 2.25, "speed": {"tokens_per_second": 1234.5, "share_of_peak": 0.614},
}  # fmt: skip


def test_a_line_for_people() -> None:
    assert held_out_lines(LINE).splitlines() == [
        "step 4/12  level 0: held-out loss 3.00 3.25, top-1 0.50 0.25",
        "           level 1: held-out loss 2.00 2.50, top-1 0.75 0.50",
        "           held-out tau 2.31 (m = 0: 2.25), 1,234 tokens/s, 61% of peak",
    ]
    bare = LINE | {"held_out": {"loss0": [], "top1_0": []}, "held_out_tau": None}
    assert held_out_lines(bare).splitlines()[1].strip() == "1,234 tokens/s, 61% of peak"


def test_curves_show_every_level_and_step(tmp_path) -> None:
    lines = [LINE, LINE | {"step": 8, "held_out_tau": None}]
    loss, top1, tau = draw(lines).axes
    assert [len(axes.lines) for axes in (loss, top1, tau)] == [4, 4, 2]
    assert np.asarray(loss.lines[1].get_ydata()).tolist() == [3.25, 3.25]
    assert np.asarray(tau.lines[0].get_xdata()).tolist() == [4]  # where tau is known
    save_curves(lines[:1], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_evaluation_is_seen_and_a_tau_that_was_not_measured_has_no_panel() -> None:
    loss, top1 = draw([LINE | {"held_out_tau": None, "held_out_tau_m0": None}]).axes
    assert [line.get_marker() for line in (*loss.lines, *top1.lines)] == ["o", "o", "s", "s"] * 2
    assert top1.get_xlabel() == "step"


def test_numbers_of_a_line_by_name() -> None:
    found = dict(scalars(LINE | {"held_out_tau": None}))
    assert found["held_out/loss0/1"] == 3.25
    assert found["speed/share_of_peak"] == 0.614
    assert "held_out_tau" not in found
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("track", ["tensorboard", "wandb", "trackio"])
def test_a_missing_tracker_is_one_line(track: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, track, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match=re.escape(f"track={track} needs a package more: {install(track)}")):
        check_tracker(track)
    check_tracker("none")


@pytest.mark.parametrize("track", ["wandb", "trackio"])
def test_a_hosted_tracker_hears_every_number(track: str, monkeypatch, tmp_path) -> None:
    told: list[tuple] = []
    package = SimpleNamespace(
        init=lambda **named: told.append(("init", named["project"], named["name"], named["config"]["lr"])),
        log=lambda values, step: told.append(("log", step, values["held_out/loss0/0"])),
        finish=lambda: told.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, track, package)
    tracker = open_tracker(tiny_config(tmp_path / "mine", track=track, lr=0.5), tmp_path)
    assert isinstance(tracker, Hosted)
    tracker.log(4, dict(scalars(LINE)))
    tracker.close()
    assert told == [("init", "secondguess", "mine", 0.5), ("log", 4, 3.0), ("finish",)]


def test_tensorboard_files_hold_the_numbers(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    tracker = open_tracker(TrainConfig(responses="-", out="-", track="tensorboard"), tmp_path)
    assert tracker is not None
    tracker.log(4, dict(scalars(LINE)))
    tracker.close()
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Scalars("held_out/loss0/0")[0].value == 3.0
