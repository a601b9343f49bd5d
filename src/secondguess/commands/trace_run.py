"""What ``secondguess trace`` runs."""

from __future__ import annotations

import argparse
from functools import cache
from typing import TYPE_CHECKING, Any

from secondguess.atomic import writing
from secondguess.bench.plan import shape
from secondguess.bench.tasks import TaskPrompt
from secondguess.bench.trace import Tracer
from secondguess.commands.recordings import recordings, replay_all, speculators_of
from secondguess.methods import Method
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console


def trace(
    args: argparse.Namespace, target: HFTarget, methods: list[Method], prompts: list[TaskPrompt], console: Console
) -> list[dict[str, Any]]:
    """Write ``args.out``; a row per temperature and method says what is in it."""
    rows = []
    with writing(args.out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for recording in recordings(args, target, methods, prompts, console):
            tracer = Tracer(file, recording.prompts, recording.temperature, cache(target.tokenizer.decode))
            speculators = speculators_of(args, target, methods, recording)
            replay_all(target, speculators, recording, args.batch_size, tracer.listen, console)
            rows += [
                {
                    "method": m.typed,
                    "temperature": recording.temperature,
                    **shape(m),
                    "num_prompts": len(recording.prompts),
                    "num_cycles": tracer.num_cycles(m),
                }
                for m in methods
            ]
    return rows
