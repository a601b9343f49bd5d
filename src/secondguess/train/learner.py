"""One step of training: batches, their gradients added up over micro-batches and processes, and the weights moved."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.drafter.model import Drafter
from secondguess.train.anchor import make_anchor
from secondguess.train.batch import Batch, trained_rows
from secondguess.train.config import TrainConfig
from secondguess.train.device import use_bfloat16
from secondguess.train.feed import Feed
from secondguess.train.flops import step_flops
from secondguess.train.objective import objectives, reconsider_of
from secondguess.train.parallel import Processes, add_gradients, parallelize, whole
from secondguess.train.second import Reconsider
from secondguess.train.start import new_optimizer
from secondguess.train.tally import nothing


class Diverged(ArithmeticError):
    """The loss or its gradient is no number any more."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a step came to, over all its batches and processes."""

    sums_TF: Tensor  # float64, see ``tally``
    tokens: float  # trained, each counted once: the rows of the first unroll step
    loss: float
    grad_norm: float  # before clipping
    level1_grad_norm: float | None = None  # of level 1's own weights, where they are clipped apart


class Loss(nn.Module):
    """The objectives as a module: what FSDP needs to know when weights are used."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        super().__init__()
        self.drafter, self.config, self.anchor = drafter, config, make_anchor(config, drafter)

    def forward(
        self, batch: Batch, look: Reconsider | None, step_rows: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return objectives(self.drafter, batch, self.config, look, step_rows, self.anchor)


class Learner:
    """A drafter, its optimizer and its data, in one of the processes that train it."""

    def __init__(self, drafter: Drafter, feed: Feed, config: TrainConfig, processes: Processes) -> None:
        self.drafter, self.feed, self.config, self.processes = drafter, feed, config, processes
        self.device = drafter.embedding.device
        self.bfloat16 = use_bfloat16(config.precision, self.device)
        loss = Loss(drafter, config)
        self.anchor = loss.anchor
        own = drafter.config.level1_tensors
        named = list(drafter.named_parameters())
        self.shared, self.own = [p for n, p in named if n not in own], [p for n, p in named if n in own]
        if config.taught_by == "none":
            for p in self.shared:
                p.requires_grad_(False)
        self.loss = parallelize(loss, config.parallel, self.device)
        self.optimizer = new_optimizer(drafter, config)

    def products(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    def step(self, number: int, batches: Sequence[list[int]], lr: float) -> Done:
        """Move the weights once, by the gradient over ``batches`` of responses. Raises Diverged, and moves nothing, if
        the loss or a gradient is no number.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, sums_TF = self.gradients(number, batches)
        norms = [whole(norm.detach()).to(loss) for norm in self.clip()]
        numbers = torch.stack([sums_TF[0, 0], loss, *norms]).tolist()  # at once: all wait for the device here
        for name, value in zip(("loss", "gradient", "gradient of level 1"), numbers[1:], strict=False):
            if not math.isfinite(value):
                fix = "nothing is exported; lower lr or clip, and choose another out folder"
                raise Diverged(f"the {name} is {value} at step {number + 1}: {fix}")
        self.optimizer.step()
        if self.anchor:
            self.anchor.follow(self.drafter)
        return Done(sums_TF, *numbers)

    def gradients(self, number: int, batches: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Leave with the weights the gradient of a step over all ``batches``, of which this process reads its share.

        Returns the loss and ``sums_TF`` (see ``tally``) of all processes, both float64.

        Which rows are the most doubtful (``rho``, ``carry``) is settled within a share; else the split changes nothing.
        """
        self.optimizer.zero_grad(set_to_none=True)
        with self.products():
            mine = [self.feed.batch(self.share(indices)) for indices in batches]
        counted = torch.stack([trained_rows(batch, self.config.unroll_steps) for batch in mine])
        step_rows = self.processes.add(counted.sum(0)).tolist()
        loss, sums_TF = torch.zeros((), dtype=torch.float64, device=self.device), self.nothing()
        for i, batch in enumerate(mine):
            part = (number * len(batches) + i) * self.processes.count + self.processes.rank
            with self.products():
                level0, level1, seen = self.loss(batch, reconsider_of(self.config, part), step_rows)
            self.backward(level0, level1)
            loss += (level0 + level1).detach()
            sums_TF += seen
        if self.processes.count > 1:
            add_gradients(self.drafter.parameters())
        total = self.processes.add(torch.cat([loss[None], sums_TF.flatten()]))
        return total[0], total[1:].view_as(sums_TF)

    def nothing(self) -> Tensor:
        return nothing(self.config.unroll_steps, self.device)

    def share(self, indices: list[int]) -> list[int]:
        """The responses of a batch that this process reads. All wait for the slowest, so each has the same to do."""
        return self.processes.even_share(indices, [self.flops([i]) for i in indices])

    def flops(self, indices: list[int]) -> float:
        """Of a step over these responses, by all processes."""
        spans = ((len(r.input_ids), r.prompt_len) for r in (self.feed.responses[i] for i in indices))
        rho = self.config.rho if self.config.recipe.level1 else 0.0
        return step_flops(self.drafter.config, spans, self.config.unroll_steps, rho, self.config.taught_by)

    def backward(self, level0: Tensor, level1: Tensor) -> None:
        """Add to the gradients; each level's to its own weights alone where level 1 has no say in the shared ones."""
        if self.config.taught_by != "level0":
            (level0 + level1).backward()
            return
        level0.backward(inputs=self.shared)
        level1.backward(inputs=self.own)

    def clip(self) -> list[Tensor]:
        """Clip the gradients, and return their norm before. Where level 1 has no say in the shared weights, its own
        neither: then the norms are that of the shared ones, and that of its own.
        """
        if self.config.taught_by != "level0":
            return [nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip)]
        return [nn.utils.clip_grad_norm_(weights, self.config.clip) for weights in (self.shared, self.own)]
