"""How many of a drafter's guesses are right: replay over the target's greedy answers to the doctor's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from secondguess.bench.acceptance import Tally, count
from secondguess.bench.plan import Prompt
from secondguess.bench.replay import Text, read, replay
from secondguess.bench.tasks import FOLDER, load_tasks
from secondguess.bench.transcript import BEYOND
from secondguess.commands.compare import prompt_ids
from secondguess.commands.conversations import transcribe
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.thread import run
from secondguess.target.hf import HFTarget
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

PROMPTS = FOLDER / "doctor.jsonl"
BATCH = 20


@dataclass(frozen=True, slots=True)
class Probe:
    """Texts with the states that the target had at them, and the trees that are drafted over them."""

    texts: Sequence[Text]
    tree: TreeConfig

    def replay(self, drafter: Drafter) -> list[Tally]:
        """What the drafter's guesses came to, text by text."""
        columns = max(text.num_written for text in self.texts) + BEYOND
        speculator = run(EagleSpeculator, drafter, self.tree, len(self.texts), columns)
        tallies = [Tally(looping=False) for _ in self.texts]  # no matter here
        run(replay, speculator, self.texts, partial(count, tallies))
        return tallies


def open_probe(
    target: HFTarget,
    tree: TreeConfig,
    max_new_tokens: int,
    console: Console,
    variables: Mapping[str, Any] | None = None,
) -> Probe:
    """Decode the answers, unless they are known. The states are those of the layers that ``target`` taps by now.

    ``variables``: what the chat template is given besides the questions.
    """
    prompts = [
        Prompt(task.task, task.id, tuple(prompt_ids(target, task.turns[0], variables=variables)), task.stop)
        for task in load_tasks([str(PROMPTS)])
    ]
    transcripts = transcribe(target, prompts, SamplingParams(max_tokens=max_new_tokens), BATCH, console)
    return Probe([run(read, target, transcript) for transcript in transcripts], tree)
