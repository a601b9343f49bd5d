"""What ``secondguess eval`` runs: record the texts that are missing, replay every drafter over all of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from secondguess.bench.acceptance import Tally, count, measure
from secondguess.bench.plan import shape
from secondguess.bench.tasks import TaskPrompt
from secondguess.commands.recordings import recordings, replay_all, speculators_of
from secondguess.engine.cycle import CycleTrace
from secondguess.methods import Method
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]


def evaluate(
    args: argparse.Namespace,
    target: HFTarget,
    methods: list[Method],
    against: str,
    prompts: list[TaskPrompt],
    console: Console,
) -> list[Row]:
    """One row per temperature, task and method, in this order, and over all tasks if there are several."""
    rows = []
    for recording in recordings(args, target, methods, prompts, console):
        tallies = {m: recording.tallies() for m in methods}
        speculators = speculators_of(args, target, methods, recording)
        replay_all(target, speculators, recording, args.batch_size, partial(tally, tallies), console)
        names = [p.task for p in recording.prompts]
        tasks = [[i for i, name in enumerate(names) if name == task] for task in dict.fromkeys(names)]
        if len(tasks) > 1:
            tasks.append(list(range(len(names))))
        for part in tasks:
            of = {names[i] for i in part}
            task = of.pop() if len(of) == 1 else "all tasks"
            rows += [row(m, task, recording.temperature, tallies, part, against) for m in methods]
    return rows


def tally(tallies: dict[Method, list[Tally]], method: Method, texts: Sequence[int], trace: CycleTrace) -> None:
    count(tallies[method], texts, trace)


def row(
    method: Method,
    task: str,
    temperature: float,
    tallies: dict[Method, list[Tally]],
    part: Sequence[int],
    against: str,
) -> Row:
    other = next((m for m in tallies if m.typed == against and m.tree.budget == method.tree.budget), None)
    ours = [tallies[method][i] for i in part]
    theirs = None if other is None or other == method else [tallies[other][i] for i in part]
    return {
        "method": method.typed,
        "task": task,
        "temperature": temperature,
        **shape(method),
        **measure(ours, theirs),
    }
