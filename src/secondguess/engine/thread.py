"""The one thread of a process that runs engines: sync, streaming and async callers share it, and so do several LLMs.

It is also a matter of speed. Every thread that runs parallel operations gets OpenMP workers of its own, and once all
of them outnumber the cores, libgomp lets them sleep between two operations: on two cores, plain decoding took 1.5 to
1.8 times as long when a model was loaded in one thread and ran in another. So loading happens here, too, and whatever
else works on large tensors beside an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

process: int | None = None  # whose thread it is
EXECUTOR = ThreadPoolExecutor(1, "secondguess-engine")
submit = EXECUTOR.submit

P = ParamSpec("P")
T = TypeVar("T")


def run(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``work``, done by the engine's thread, which must not be the caller's.

    Raises RuntimeError in a process that was forked after something ran: neither the thread nor OpenMP's workers came
    along, and waiting for them would have no end.
    """
    global process
    if process not in (None, os.getpid()):
        raise RuntimeError("secondguess ran before this process was forked: start processes with spawn instead")
    process = os.getpid()
    return submit(work, *args, **kwargs).result()
