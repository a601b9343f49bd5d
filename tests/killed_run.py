"""Run by ``test_run_folder``: a training run that is killed again and again, and the same one left alone.

In a process of its own, because one that has run a backward pass cannot be forked.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from tiny_run import tiny_run

ATTEMPTS = 8
CHANGES = {"method": "pr", "batch_size": 2, "accumulate": 2, "eval_every": 2, "save_every": 1}


def forked(folder: Path, name: str, seconds: float) -> int:
    """Train in a child that is killed after ``seconds``; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            tiny_run(folder, name, **CHANGES).run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # a fork cannot take threads along
    tiny_run(folder, "whole")  # captures
    start = time.perf_counter()
    assert forked(folder, "whole", 100) == 0
    whole, rng, killed = time.perf_counter() - start, random.Random(), 0
    for _ in range(ATTEMPTS):
        status = forked(folder, "killed", rng.uniform(0, whole / 3))
        assert status == 0 or os.WIFSIGNALED(status), status
        killed += status != 0
    assert forked(folder, "killed", 100) == 0
    sys.stdout.write(f"{killed}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
