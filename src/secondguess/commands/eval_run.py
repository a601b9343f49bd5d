"""What ``secondguess eval`` runs: record the texts that are missing, replay every drafter over all of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from secondguess.bench.acceptance import Tally, count
from secondguess.bench.evaluation import Evaluation, Run
from secondguess.bench.plan import shape
from secondguess.bench.tasks import TaskPrompt
from secondguess.commands.recordings import recordings, replay_all, speculators_of
from secondguess.engine.cycle import CycleTrace
from secondguess.methods import Method
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console


def evaluate(
    args: argparse.Namespace,
    target: HFTarget,
    methods: list[Method],
    prompts: list[TaskPrompt],
    console: Console,
) -> list[Evaluation]:
    """One per temperature."""
    found = []
    for recording in recordings(args, target, methods, prompts, console):
        tallies = {m: recording.tallies() for m in methods}
        speculators = speculators_of(args, target, methods, recording)
        replay_all(target, speculators, recording, args.batch_size, partial(tally, tallies), console)
        runs = [Run(m.typed, shape(m), counted) for m, counted in tallies.items()]
        found.append(Evaluation(recording.temperature, [p.task for p in recording.prompts], runs))
    return found


def tally(tallies: dict[Method, list[Tally]], method: Method, texts: Sequence[int], trace: CycleTrace) -> None:
    count(tallies[method], texts, trace)
