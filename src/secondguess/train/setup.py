"""Everything a training run needs, found and checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from secondguess.capture.run import check_room, disk_need, fill, plan_capture
from secondguess.capture.source import FeatureSource, Live
from secondguess.capture.store import StateStore
from secondguess.drafter.shipped import find_drafter
from secondguess.methods import load_examined
from secondguess.target.hf import HFTarget
from secondguess.train.config import TrainConfig
from secondguess.train.data import Response, check_lengths, read_responses
from secondguess.train.device import open_target
from secondguess.train.origin import origin_of
from secondguess.train.parallel import Processes
from secondguess.train.start import tap_layers_of
from secondguess.train.track import check_tracker
from secondguess.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Captures:
    """A target whose states are, or will be, on disk, and what makes those that are missing."""

    target: HFTarget
    sequences: list[tuple[int, ...]]
    store: StateStore
    source: FeatureSource

    def fill(self, on_tokens: Callable[[int], None]) -> None:
        """Make what is missing. ``on_tokens`` hears how many more tokens were done."""
        fill(self.store, self.source, self.target.fingerprint, on_tokens)

    @property
    def bytes_missing(self) -> int:
        return disk_need(self.target, self.store)


@dataclass(frozen=True, slots=True)
class Setup:
    """A run ready to go. ``captures`` is None if the target runs beside the training."""

    trainer: Trainer
    captures: Captures | None


def prepare(
    config: TrainConfig,
    record: Mapping[str, Any],
    say: Callable[[str], None],
    device: torch.device,
    processes: Processes,
) -> Setup:
    """Load the target and the data, and set the run up or pick it up again. Raises UserError if anything is amiss."""
    check_tracker(config.track)
    target = open_target(config.target, config.precision, device, config.trust_remote_code, say)
    responses = read_fitting(Path(config.responses), target, say)
    if config.anchor_to != "none":
        load_examined(find_drafter(config.anchor_to, config.anchor_to, target.embedding), target)
    tap_layers = tap_layers_of(target, config.warm_start)
    if config.captures == "none":
        captures, source = None, Live(target, [r.input_ids for r in responses], tap_layers)
    else:
        captures = plan_captures(target, responses, Path(config.captures), tap_layers)
        source = captures.store
    return Setup(Trainer(config, target, responses, source, record, processes), captures)


def read_fitting(path: Path, target: HFTarget, say: Callable[[str], None]) -> list[Response]:
    """Responses that the target can have written. Raises UserError naming the first that it cannot.

    ``say`` hears of rows that are left out, and of prompts in another form than the target's chat template gives them.
    """
    responses = read_responses(path.expanduser(), target.spec.vocab_size, say)
    check_lengths(responses, target.spec.context_len)
    origin = origin_of(responses, target)
    if origin.num_strange:
        start = origin.facts.answer_start
        made = f"{origin.num_strange} of {len(responses)} prompts do not end with {start!r}, as those that"
        say(f"{made} are served will: another chat template or thinking mode; the drafter will be made for that one")
    return responses


def plan_captures(
    target: HFTarget, responses: list[Response], folder: Path, tap_layers: tuple[int, ...] | None
) -> Captures:
    """Where the states lie or will lie. ``tap_layers``: see ``FeatureSource``.

    Raises UserError if the disk has no room for those that are missing.
    """
    sequences = [r.input_ids for r in responses]
    store = plan_capture(target, sequences, folder.expanduser(), tap_layers)
    captures = Captures(target, sequences, store, Live(target, sequences, tap_layers))
    check_room(captures.store.folder, captures.bytes_missing)
    return captures
