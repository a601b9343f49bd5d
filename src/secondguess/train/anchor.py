"""``balance=anchor``: a level 0 to hold on to, so that sharing M with level 1 does not weaken it.

arXiv 2611.05724 does not define its balance term. This reading of it: beta times the KL divergence of the drafter's
level 0 from the level 0 of a reference, over the reference's own steps (nothing carried). The reference takes one
forward of its level 0, no gradient: about a sixth of a training step of PR.
"""

from __future__ import annotations

from typing import Any

import torch

from secondguess.drafter.checkpoint import load_drafter
from secondguess.drafter.model import Drafter
from secondguess.drafter.shipped import find_drafter
from secondguess.errors import UserError
from secondguess.train.config import TrainConfig


class Anchor:
    """``reference`` is a moving average of the drafter's weights, or stays as it is (``decay`` 1).

    The average is part of a run's state: without it a resumed run would be another one.
    """

    def __init__(self, reference: Drafter, decay: float) -> None:
        self.reference, self.decay = reference.requires_grad_(False), decay

    @torch.no_grad()
    def follow(self, drafter: Drafter) -> None:
        """Move towards the drafter's weights; once after each step."""
        if self.decay < 1:
            for ours, theirs in zip(self.reference.parameters(), drafter.parameters(), strict=True):
                ours.lerp_(theirs, 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return self.reference.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reference.load_state_dict(state)


def make_anchor(config: TrainConfig, drafter: Drafter) -> Anchor | None:
    """For a drafter at its start point. None unless the balance term is an anchor.

    Raises UserError if ``anchor_to`` names no drafter, or one for another target, with another vocabulary or fed by
    other layers.
    """
    if config.balance != "anchor":
        return None
    if config.anchor_to == "none":
        return Anchor(copy_of(drafter), config.anchor_decay)
    folder = find_drafter(config.anchor_to, config.anchor_to, drafter.embedding)
    reference = load_drafter(folder, drafter.embedding, drafter.config.target_num_layers)
    if not torch.equal(reference.target_ids, drafter.target_ids):
        raise UserError(
            f"anchor_to {folder} has another draft vocabulary: start from it and leave draft_vocab_size out"
        )
    if reference.config.tap_layers != drafter.config.tap_layers:
        raise UserError(f"anchor_to {folder} reads other layers: start from it too, warm_start={folder}")
    reference.tap_index = drafter.tap_index
    return Anchor(reference, 1.0)


def copy_of(drafter: Drafter) -> Drafter:
    """The same weights over the same embedding, which is not copied."""
    copy = Drafter(drafter.config, drafter.embedding, drafter.target_ids).to(drafter.embedding)
    copy.tap_index = drafter.tap_index
    copy.load_state_dict(drafter.state_dict())
    return copy
