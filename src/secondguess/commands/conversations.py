"""Tasks as token ids. A later turn follows the target's own answer to the turn before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.bench.plan import Prompt
from secondguess.bench.tasks import TaskPrompt
from secondguess.bench.transcript import BEYOND, Transcript, TranscriptStore, record
from secondguess.cache import cache_dir
from secondguess.commands.compare import prompt_ids
from secondguess.commands.progress import progress
from secondguess.commands.record import make_record
from secondguess.errors import UserError, require
from secondguess.llm import LLM
from secondguess.prompts import Message
from secondguess.target.hf import HFTarget
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console


def encode_all(
    target: HFTarget,
    tasks: Sequence[TaskPrompt],
    max_new_tokens: int,
    batch_size: int,
    console: Console,
    folder: Path | None = None,
) -> list[Prompt]:
    """A prompt per turn, in order: ``ID`` is the first, ``ID#2`` the second.

    Whatever the temperature of a run, a later turn follows the plain answer at temperature 0 of at most
    ``max_new_tokens`` tokens, so that all methods and temperatures get the same prompts.
    ``folder``: see ``transcribe``.
    """
    greedy = SamplingParams(max_tokens=max_new_tokens)
    talks: dict[TaskPrompt, list[Message]] = {task: [] for task in tasks}
    made: dict[TaskPrompt, list[Prompt]] = {task: [] for task in tasks}
    for turn in range(max(len(task.turns) for task in tasks)):
        for task, messages in talks.items():
            messages.append({"role": "user", "content": task.turns[turn]})
            made[task].append(encode(target, task, turn, messages))
        talks = {task: messages for task, messages in talks.items() if len(task.turns) > turn + 1}
        if talks:
            answers = transcribe(target, [made[task][-1] for task in talks], greedy, batch_size, console, folder)
            for messages, answer in zip(talks.values(), answers, strict=True):
                text = target.tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
    prompts = [prompt for task in tasks for prompt in made[task]]
    for (task, name), count in Counter((p.task, p.id) for p in prompts).items():
        require(count == 1, f"task {task}: row {name!r} has the name of another row's later turn: give it another id")
    return prompts


def encode(target: HFTarget, task: TaskPrompt, turn: int, messages: list[Message]) -> Prompt:
    """Raises UserError, with the row's name, if a prompt leaves no room for an answer."""
    name = f"{task.id}#{turn + 1}" if turn else task.id
    try:
        return Prompt(task.task, name, tuple(prompt_ids(target, messages)), task.stop)
    except UserError as error:
        raise UserError(f"task {task.task}, row {name}: {error}") from error


def transcribe(
    target: HFTarget,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch_size: int,
    console: Console,
    folder: Path | None = None,
) -> list[Transcript]:
    """Plain decoding's texts; those that ``folder`` holds, by default one of the user's cache, are not made again."""
    longest = max(len(p.ids) for p in prompts) + params.max_tokens + BEYOND
    if longest > target.spec.context_len:
        raise UserError(
            f"the longest prompt and its answer need {longest} tokens ({BEYOND} of them to spare), the context holds "
            f"{target.spec.context_len}: lower --max-new-tokens"
        )
    passport = make_record()
    made_of = {
        "target": target.fingerprint,
        "mode": target.spec.mode,
        "forward": target.forward_id,
        "device": target.spec.device.type,
        "end": sorted(target.spec.eos_token_ids),
        "beyond": BEYOND,
        "temperature": params.temperature,
        "seed": params.seed,
        "max_new_tokens": params.max_tokens,
        "versions": {name: passport["versions"][name] for name in ("torch", "transformers")},
        "machine": passport["machine"],
    }
    store = TranscriptStore(folder or cache_dir() / "transcripts", made_of)
    llm = LLM(target, method="ar", max_batch_size=batch_size, max_model_len=longest)
    with progress(console) as bar:
        task = bar.add_task(f"plain texts, T = {params.temperature:g}", total=len(prompts))
        return record(llm, prompts, params, store, lambda n: bar.advance(task, n))
