"""Evaluation on held-out responses. Changes neither weights nor random numbers of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from secondguess.drafter.model import Drafter
from secondguess.train.config import TrainConfig
from secondguess.train.data import Response
from secondguess.train.learner import Learner
from secondguess.train.objective import objectives, reconsider_of
from secondguess.train.tally import Tally
from secondguess.train.tau import held_out_tau


@dataclass(frozen=True, slots=True)
class Judge:
    """What is held out, as indices of responses: all of it, and those that tau is measured on."""

    config: TrainConfig
    held_out: list[int]
    replayed: list[int]

    @torch.no_grad()
    def losses(self, drafter: Drafter, learner: Learner) -> dict[str, list[float]]:
        """Per unroll step and level; every row gets a second look here, whatever rho trains on.

        Each process does its share. ``drafter`` is the learner's, with all its weights.
        """
        sums_TF, look = learner.nothing(), reconsider_of(self.config, 0)
        # Nothing carried: level 0 then does what EAGLE's does, and their numbers compare.
        look = look and replace(look, rho=1.0, carry="off")
        size = self.config.batch_size
        batches = [self.held_out[i : i + size] for i in range(0, len(self.held_out), size)]
        with learner.products():
            for indices in learner.processes.share(batches):
                sums_TF += objectives(drafter, learner.feed.batch(indices), self.config, look)[2]
        return Tally.of(learner.processes.add(sums_TF)).summary()

    def tau(self, drafter: Drafter, learner: Learner) -> dict[str, float | None]:
        """See ``held_out_tau``."""
        return held_out_tau(drafter, learner.feed, self.replayed, self.config.eval_budget, learner.processes)


def pick_replayed(responses: Sequence[Response], held_out: Sequence[int], limit: int) -> list[int]:
    """Evenly spaced among the held-out responses: the greedy ones, or all if none is known to be."""
    fit = [i for i in held_out if responses[i].temperature == 0] or held_out
    limit = min(limit, len(fit))
    return [fit[n * len(fit) // limit] for n in range(limit)]
