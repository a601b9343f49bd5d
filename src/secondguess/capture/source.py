"""Where training takes the target's states from: shards on disk, or the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from secondguess.capture.run import run_target
from secondguess.capture.store import States
from secondguess.target.base import Target


class FeatureSource(Protocol):
    """States of a list of sequences. ``StateStore`` reads them, ``Live`` makes them."""

    def read(self, indices: Sequence[int]) -> list[States]:
        """The states of these sequences, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """The target runs whenever states are asked for: no disk, but a pass of the target for every epoch.

    The states are those of the shards, rounded alike: the same bits wherever the target's rows do not depend on what
    else is in the pass (float32 on the CPU).
    """

    target: Target
    sequences: Sequence[Sequence[int]]

    def read(self, indices: Sequence[int]) -> list[States]:
        with torch.autocast(self.target.spec.device.type, enabled=False):  # a trainer's precision is its own
            found = dict(run_target(self.target, self.sequences, indices))
        return [found[i] for i in indices]
