"""What ``secondguess eval`` runs: record the texts that are missing, replay every drafter over all of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.bench.acceptance import Tally, count, measure
from secondguess.bench.metrics import is_looping
from secondguess.bench.plan import Prompt, shape
from secondguess.bench.replay import read, replay
from secondguess.bench.tasks import TaskPrompt
from secondguess.bench.transcript import BEYOND, Transcript, TranscriptStore, record
from secondguess.commands.progress import progress
from secondguess.commands.record import make_record
from secondguess.commands.workload import encode
from secondguess.drafter.model import Drafter
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.methods import Method, make_speculator
from secondguess.target.gguf import cache_dir
from secondguess.target.hf import HFTarget
from secondguess.types import SamplingParams

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
    if any(m.tree.num_steps > BEYOND for m in methods):
        raise UserError(f"replay knows {BEYOND} tokens past the end of a text: num_steps must be at most that")
    encoded = [encode(target, prompt) for prompt in prompts]
    rows = []
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=args.seed, max_tokens=args.max_new_tokens)
        transcripts = transcribe(target, encoded, params, args.batch_size, console)
        tallies = replay_all(target, methods, args.drafter, transcripts, args.batch_size, console)
        tasks = [[i for i, p in enumerate(encoded) if p.task == task] for task in dict.fromkeys(p.task for p in encoded)]
        if len(tasks) > 1:
            tasks.append(list(range(len(encoded))))
        for part in tasks:
            names = {encoded[i].task for i in part}
            task = names.pop() if len(names) == 1 else "all tasks"
            rows += [row(m, task, temperature, tallies, part, against) for m in methods]
    return rows


def transcribe(
    target: HFTarget, prompts: Sequence[Prompt], params: SamplingParams, batch_size: int, console: Console
) -> list[Transcript]:
    """Plain decoding's texts, from the user's cache where they are known."""
    longest = max(len(p.ids) for p in prompts) + params.max_tokens + BEYOND
    if longest > target.spec.context_len:
        raise UserError(
            f"the longest prompt and its answer need {longest} tokens (with {BEYOND} to spare), the context holds "
            f"{target.spec.context_len}: lower --max-new-tokens"
        )
    record_ = make_record()
    made_of = {
        "target": target.fingerprint,
        "dtype": str(target.spec.dtype),
        "temperature": params.temperature,
        "seed": params.seed,
        "max_new_tokens": params.max_tokens,
        "versions": {name: record_["versions"][name] for name in ("torch", "transformers")},
        "machine": record_["machine"],
    }
    store = TranscriptStore(cache_dir() / "transcripts", made_of)
    llm = LLM(target, method="ar", max_batch_size=batch_size, max_model_len=longest)
    with progress(console) as bar:
        task = bar.add_task(f"plain texts, T = {params.temperature:g}", total=len(prompts))
        return record(llm, prompts, params, store, lambda n: bar.advance(task, n))


def replay_all(
    target: HFTarget,
    methods: Sequence[Method],
    drafter: str | None,
    transcripts: Sequence[Transcript],
    batch_size: int,
    console: Console,
) -> dict[Method, list[Tally]]:
    """A tally per method and transcript. The target runs once over each, whatever the number of methods."""
    columns = max(len(t.prompt_ids) + len(t.answer_ids) for t in transcripts) + BEYOND
    given = {m: drafter if m.has_drafter else None for m in methods}
    loaded: dict[Path, Drafter] = {}
    speculators = {m: run(make_speculator, m, target, given[m], batch_size, columns, loaded) for m in methods}
    tallies = {m: [Tally(is_looping(t.answer_ids)) for t in transcripts] for m in methods}
    with progress(console) as bar:
        task = bar.add_task("replay", total=len(transcripts) * len(methods))
        for start in range(0, len(transcripts), batch_size):
            texts = [run(read, target, t) for t in transcripts[start : start + batch_size]]
            for method, speculator in speculators.items():
                part = tallies[method][start : start + batch_size]
                run(replay, speculator, texts, lambda running, trace, part=part: count(part, running, trace))
                bar.advance(task, len(texts))
    return tallies


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
    theirs = [tallies[other][i] for i in part] if other not in (None, method) else None
    return {
        "method": method.typed,
        "task": task,
        "temperature": temperature,
        **shape(method),
        **measure(ours, theirs),
    }
