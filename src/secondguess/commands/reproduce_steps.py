"""The picture of co-forwarding that ``secondguess reproduce`` draws, from one cycle of a real text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.atomic import replacing
from secondguess.bench.replay import read, replay
from secondguess.bench.steps import Look, StepWatch
from secondguess.bench.tasks import TaskPrompt
from secondguess.commands.recordings import recordings
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.thread import run
from secondguess.methods import Method, open_drafter
from secondguess.reproduce.picture import page
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console

PICTURE = "coforwarding.svg"
NUM_PROMPTS = 4  # that the cycle is looked for in


@dataclass(slots=True)
class Shot:
    """The best cycle so far: most accepted second guesses, then most accepted tokens."""

    rank: tuple[int, int] = (-1, -1)
    steps: Sequence[Sequence[Look]] = ()
    trace: CycleTrace | None = None

    def take(self, watch: StepWatch, texts: Sequence[int], trace: CycleTrace) -> None:
        count = int(trace.verdict.num_emitted_R[0])
        path_D = trace.verdict.path_RD[0, :count]
        rank = int(trace.tree.levels_RN[0, path_D].sum()), count
        if rank > self.rank:
            self.rank, self.steps, self.trace = rank, watch.steps, trace


def draw_steps(
    args: argparse.Namespace,
    target: HFTarget,
    method: Method,
    prompts: Sequence[TaskPrompt],
    folder: Path,
    console: Console,
    texts: Path | None = None,
) -> None:
    """Write PICTURE to ``folder``, if the texts, which are kept in ``texts``, have a cycle.

    ``args.drafter`` drafts, at the only one of ``args.temperatures``.
    """
    [recording] = recordings(args, target, [method], list(prompts[:NUM_PROMPTS]), console, folder=texts)
    drafter = run(open_drafter, method, target, args.drafter)
    watch, shot = run(StepWatch, drafter, method.tree, 1, recording.num_columns), Shot()
    for transcript, draw in recording.drawn:
        run(replay, watch, [run(read, target, transcript, draw)], partial(shot.take, watch))
    if shot.trace is not None:
        with replacing(folder / PICTURE) as temporary:
            temporary.write_text(page(shot.steps, shot.trace, cache(target.tokenizer.decode)), encoding="utf-8")
