"""Missing shards of states, made by workers all over a Ray cluster. Whoever imports this needs the extra ``ray``.

Every worker loads the target once and takes a shard at a time. All machines have to see the responses and the shards
under the same paths. A worker that dies is replaced, and its shard made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from secondguess.capture.run import fill
from secondguess.device import choose_device
from secondguess.integrations.ray_cluster import connect
from secondguess.train.device import open_target
from secondguess.train.setup import plan_captures, read_fitting


@dataclass(frozen=True, slots=True)
class Task:
    """What each worker is told, by the arguments of ``secondguess capture``."""

    target: str
    responses: Path
    captures: Path
    precision: str
    device: str  # ``auto``: what each worker finds
    gpus: float  # that each has for itself
    trust_remote_code: bool
    tap_layers: tuple[int, ...] | None  # see ``FeatureSource``
    shards: list[list[int]]  # the sequences of each


class Worker:
    def __init__(self, task: Task) -> None:
        target = open_target(task.target, task.precision, choose_device(task.device), task.trust_remote_code, silent)
        responses = read_fitting(task.responses, target, silent)
        self.captures = plan_captures(target, responses, task.captures, task.tap_layers)
        self.shards = task.shards

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rows ``{"shard"}`` become rows ``{"tokens"}``."""
        c, shards = self.captures, [self.shards[number] for number in batch["shard"].tolist()]
        fill(c.store, c.source, c.target.fingerprint, lambda n: None, shards)
        return {"tokens": np.array([c.store.tokens([shard]) for shard in shards])}


def fill_with_workers(task: Task, num_workers: int, on_tokens: Callable[[int], None]) -> None:
    """Let ``num_workers`` make the shards, on the cluster that RAY_ADDRESS names or on this machine."""
    connect(num_workers + 1)  # Ray Data hands out the shards on a core of its own
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows: list[dict[str, Any]] = [{"shard": number} for number in range(len(task.shards))]
    made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker,
        batch_size=1,
        fn_constructor_args=(task,),
        compute=ray.data.ActorPoolStrategy(size=min(num_workers, len(rows))),
        num_gpus=task.gpus,
    )
    for row in made.iter_rows():
        on_tokens(int(row["tokens"]))


def silent(text: str) -> None:
    """Workers have nobody to tell."""
