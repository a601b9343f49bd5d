"""How many steps a run takes, which responses each of them sees, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from secondguess.errors import require
from secondguess.train.config import TrainConfig
from secondguess.train.data import batches


class Plan:
    """A function of the settings and the number of responses alone, so that a resumed run goes on as it would have."""

    def __init__(self, config: TrainConfig, training: Sequence[int], num_processes: int = 1) -> None:
        """``training``: indices of the responses. Raises UserError if they do not fill a step."""
        self.config, self.training = config, training
        self.step_size = config.batch_size * config.accumulate
        self.steps_per_epoch = len(training) // self.step_size
        self.num_steps = config.epochs * self.steps_per_epoch
        few = f"{len(training)} training responses do not fill one step of {self.step_size}"
        require(self.num_steps > 0, f"{few}: give more, or a smaller batch_size")
        too_many = f"batch_size must be at least {num_processes}, the number of processes, got {config.batch_size}"
        require(config.batch_size >= num_processes, too_many)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine to zero."""
        warm = max(1, round(self.config.warmup * self.num_steps))
        if step < warm:
            return self.config.lr * (step + 1) / warm
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.num_steps - warm)))

    def steps_from(self, step: int) -> Iterator[list[int]]:
        """The responses of every step that is left."""
        first_epoch, done = divmod(step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.config.epochs):
            order = list(batches(self.training, self.step_size, self.config.seed, epoch))
            yield from order[done:] if epoch == first_epoch else order

    def micro_batches(self, indices: list[int]) -> list[list[int]]:
        """The responses of a step, as they go through the drafter together."""
        size = self.config.batch_size
        return [indices[i : i + size] for i in range(0, len(indices), size)]
