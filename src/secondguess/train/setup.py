"""Everything a training run needs, found and checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.capture.run import plan_capture
from secondguess.capture.store import StateStore
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.train.config import TrainConfig
from secondguess.train.data import read_responses
from secondguess.train.start import use_bfloat16
from secondguess.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Setup:
    """A run ready to go, and the captured states (perhaps missing still) that it reads."""

    target: HFTarget
    sequences: list[tuple[int, ...]]
    store: StateStore
    trainer: Trainer


def prepare(config: TrainConfig, record: Mapping[str, Any], say: Callable[[str], None]) -> Setup:
    """Load the target and the data, and set the run up or pick it up again. Raises UserError if anything is amiss."""
    # Captured in the precision that is trained in: half the time of float32 where bfloat16 is native.
    target = load_target(config.target, "bfloat16" if use_bfloat16(config.precision) else "float32", say=say)
    responses = read_responses(Path(config.responses).expanduser(), target.spec.vocab_size, say)
    sequences = [r.input_ids for r in responses]
    store = plan_capture(target, sequences, Path(config.captures).expanduser())
    return Setup(target, sequences, store, Trainer(config, target, responses, store, record))
