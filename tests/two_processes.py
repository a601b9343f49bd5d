"""Run by ``test_parallel``: two processes that train together over gloo, as torchrun starts them.

In a process of its own, because one that has run a backward pass cannot be forked.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from secondguess.train.learner import Learner
from secondguess.train.parallel import Processes, processes, whole
from tiny_run import tiny_run

GRADIENTS: dict[str, dict[str, Any]] = {
    "eagle3.1": {"method": "eagle3.1"},
    "pr": {"method": "pr", "carry": "all", "balance": "hinge", "balance_weight": 0.3},
    "level0": {"method": "pr"},  # the default: a backward pass for each level, and two norms
}
SHARDED = "eagle3.1", "pr"
CLIP = 0.05  # below the norms, so that every gradient is scaled
RUN: dict[str, Any] = {"method": "pr", "shared_loss": "both", "accumulate": 2, "epochs": 4}


def in_float64(learner: Learner) -> Learner:
    learner.loss.double()  # not the drafter alone: FSDP must hear of it
    learner.feed = replace(learner.feed, head_VH=learner.feed.head_VH.double())
    return learner


def gradients(folder: Path, name: str, group: Processes, parallel: str = "replicate") -> dict[str, Any]:
    """Of a step over eight responses in two batches: whole, clipped, and their norms before."""
    changes = GRADIENTS[name] | {"clip": CLIP, "parallel": parallel}
    trainer = tiny_run(folder, f"gradients-{name}", processes=group, **changes)
    learner, eight = in_float64(trainer.learner), trainer.training[:8]
    loss, sums_TF = learner.gradients(0, [eight[:5], eight[5:]])
    norms = [whole(norm).item() for norm in learner.clip()]
    found = {parameter: whole(p.grad) for parameter, p in learner.drafter.named_parameters()}
    return {"loss": loss.item(), "sums": sums_TF, "norms": norms, "gradients": found}


def whole_runs(folder: Path, group: Processes) -> None:
    """One replicated; one sharded that is stopped after step 4 (kept: step 3) and goes on."""
    tiny_run(folder, "replicate", processes=group, **RUN).run()

    def stop(step: int, loss: float) -> None:
        if step == 4:
            raise InterruptedError

    try:
        tiny_run(folder, "shard", processes=group, parallel="shard", **RUN).run(stop)
    except InterruptedError:
        group.wait()
    resumed = tiny_run(folder, "shard", processes=group, parallel="shard", **RUN)
    assert resumed.step == 3
    resumed.run()


def work(folder: Path, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with processes(torch.device("cpu")) as group:
        cases = [(name, "replicate") for name in GRADIENTS] + [(name, "shard") for name in SHARDED]
        for name, parallel in cases:
            found = gradients(folder, name, group, parallel)
            if group.first:
                torch.save(found, folder / f"{name}-{parallel}.pt")
        whole_runs(folder, group)


def main(folder: Path) -> int:
    tiny_run(folder, "-")  # captures
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                work(folder, rank, port)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])) != 0)
