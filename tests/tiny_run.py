"""Training runs on a tiny target and random responses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from secondguess.capture.run import capture
from secondguess.target.hf import HFTarget
from secondguess.testing import tiny_target
from secondguess.train.config import TrainConfig
from secondguess.train.data import Response
from secondguess.train.parallel import Processes
from secondguess.train.run_folder import RunFolder
from secondguess.train.start import tap_layers_of
from secondguess.train.trainer import Trainer


def tiny_responses(seed: int = 0) -> list[Response]:
    rng = random.Random(seed)
    return [
        Response(f"r{i}", tuple(rng.randrange(1, 64) for _ in range(rng.randrange(8, 20))), prompt_len=3)
        for i in range(24)
    ]


def float32_target(seed: int = 0) -> HFTarget:
    return tiny_target("llama", seed, dtype=torch.float32)


def tiny_config(out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "responses": "-", "draft_vocab_size": 32, "unroll_steps": 3, "epochs": 3, "batch_size": 4, "eval_every": 4,
        "save_every": 3, "held_out": 0.2, "precision": "float32", "device": "cpu", "eval_responses": 4,
    }  # fmt: skip
    return TrainConfig(out=str(out), **(settings | changes))


def tiny_run(
    tmp_path: Path,
    name: str,
    data_seed: int = 0,
    target_seed: int = 0,
    processes: Processes | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer on a tiny target and 24 random responses."""
    target, responses = float32_target(target_seed), tiny_responses(data_seed)
    config = tiny_config(tmp_path / name, **changes)
    layers = tap_layers_of(target, config.warm_start)
    store = capture(target, [r.input_ids for r in responses], tmp_path / "captures", layers)
    return Trainer(config, target, responses, store, processes=processes)


def log_without_times(folder: RunFolder) -> list[dict[str, Any]]:
    return [line | {"seconds": 0, "wall_seconds": 0, "speed": 0} for line in folder.log_lines()]
