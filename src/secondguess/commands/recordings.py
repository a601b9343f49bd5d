"""Plain decoding's texts for a command's prompts, and drafters replayed over them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.bench.acceptance import Tally
from secondguess.bench.metrics import is_looping
from secondguess.bench.plan import Prompt, prompt_seed, row_of
from secondguess.bench.replay import read, replay
from secondguess.bench.tasks import TaskPrompt
from secondguess.bench.transcript import BEYOND, Transcript
from secondguess.commands.conversations import encode_all, transcribe
from secondguess.commands.progress import progress
from secondguess.drafter.model import Drafter
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.speculate import Draw, Speculator
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.methods import Method, make_speculator, open_drafter
from secondguess.target.hf import HFTarget
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

# Hears of every cycle: method, which transcripts took part, in the order of the trace's rows, and what happened.
Listener = Callable[[Method, Sequence[int], CycleTrace], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """The texts of all prompts at one temperature, in the order of the prompts."""

    temperature: float
    seed: int
    prompts: list[Prompt]
    transcripts: list[Transcript]
    drafters: dict[Path, Drafter]  # of the methods, by folder

    @property
    def num_columns(self) -> int:
        """Room that a drafter needs in its cache."""
        return max(len(t.prompt_ids) + len(t.answer_ids) for t in self.transcripts) + BEYOND

    @property
    def drawn(self) -> list[tuple[Transcript, Draw]]:
        """Each text, and how its tokens were drawn."""
        return [(t, Draw(self.temperature, prompt_seed(self.seed, t.key.id))) for t in self.transcripts]

    def tallies(self) -> list[Tally]:
        """One per text, with nothing counted yet."""
        return [Tally(is_looping(t.answer_ids), f"{t.key.task}/{row_of(t.key.id)}") for t in self.transcripts]


def recordings(
    args: argparse.Namespace,
    target: HFTarget,
    methods: list[Method],
    prompts: list[TaskPrompt],
    console: Console,
    drafters: dict[Path, Drafter] | None = None,
    folder: Path | None = None,
) -> Iterator[Recording]:
    """One per temperature.

    ``drafters``: those of the methods, if they are loaded already; ``folder``: of texts, see ``transcribe``.
    Raises UserError if ``methods`` draft further than the texts are known, or a drafter is missing or does not fit.
    """
    if any(m.tree.num_steps > BEYOND for m in methods):
        raise UserError(f"replay knows {BEYOND} tokens past the end of a text: num_steps must be at most that")
    if drafters is None:
        drafters = {}
        for m in methods:  # before hours of decoding
            if m.has_drafter:
                run(open_drafter, m, target, given(args, m), drafters)
    encoded = encode_all(target, prompts, args.max_new_tokens, args.batch_size, console, folder)
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=args.seed, max_tokens=args.max_new_tokens)
        texts = transcribe(target, encoded, params, args.batch_size, console, folder)
        yield Recording(temperature, args.seed, encoded, texts, drafters)


def given(args: argparse.Namespace, method: Method) -> str | None:
    """The drafter of a method that names none itself."""
    return args.drafter if method.takes_drafter else None


def speculators_of(
    args: argparse.Namespace, target: HFTarget, methods: Sequence[Method], recording: Recording
) -> dict[Method, Speculator]:
    """Room for ``args.batch_size`` texts each."""
    room = (args.batch_size, recording.num_columns)
    return {m: run(make_speculator, m, target, given(args, m), *room, recording.drafters) for m in methods}


def replay_all(
    target: HFTarget,
    speculators: Mapping[Method, Speculator],
    recording: Recording,
    batch_size: int,
    listen: Listener,
    console: Console,
) -> None:
    """Replay every method over every text. The target runs once over each, whatever the number of methods."""
    drawn = recording.drawn
    with progress(console) as bar:
        task = bar.add_task("replay", total=len(drawn) * len(speculators))
        for start in range(0, len(drawn), batch_size):
            texts = [run(read, target, t, draw) for t, draw in drawn[start : start + batch_size]]
            for method, speculator in speculators.items():
                run(replay, speculator, texts, shifted(listen, method, start))
                bar.advance(task, len(texts))


def shifted(listen: Listener, method: Method, start: int) -> Callable[[Sequence[int], CycleTrace], None]:
    """Texts of a batch, by their numbers among all."""
    return lambda running, trace: listen(method, [start + i for i in running], trace)
