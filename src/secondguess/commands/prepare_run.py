"""The work of ``secondguess prepare``, shown while it goes on."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from secondguess.commands.compare import load
from secondguess.commands.progress import progress
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prepare.answerer import Answerer, Local
from secondguess.prepare.answers import AnswerFile, Recipe, Turn, Writer, longest_prompt
from secondguess.prepare.chat import Chat, chat_of, load_chat
from secondguess.prepare.compact import Answer, read_answers, write_answers
from secondguess.prepare.made import Made
from secondguess.prepare.prompts import Conversation
from secondguess.prepare.selection import Selection
from secondguess.prepare.synthesize import PromptFile, Refusal, Synthesis, synthesize
from secondguess.prepare.template import check_template, user_turns

# Of a prompt at least: some are yet to be written, and a text may have more tokens than those that it was written in.
PROMPT_ROOM = 2048

Opened = AbstractAsyncContextManager[Answerer]


@dataclass(slots=True)
class Tally:
    """What became of the turns, and what it took."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # of prompts that the target wrote
    num_tokens: int = 0
    num_new_tokens: int = 0
    started: float = field(default_factory=perf_counter)  # anew when answering begins

    def count(self, turn: Turn) -> None:
        self.outcomes[turn.outcome] += turn.count
        if turn.answer:
            self.num_tokens += len(turn.answer.tokens)
            self.num_new_tokens += len(turn.answer.tokens) if turn.outcome == "answered" else 0

    @property
    def seconds(self) -> float:
        return perf_counter() - self.started


@dataclass(frozen=True, slots=True)
class Job:
    """What the flags ask for, and the target that is to do it."""

    args: Namespace
    selection: Selection
    chat: Chat
    console: Console
    tally: Tally = field(default_factory=Tally)

    async def write(
        self, opened: Opened, conversations: Sequence[Conversation], recipe: Recipe, file: AnswerFile
    ) -> None:
        async with opened as answerer:
            if self.args.synthesize:
                path = self.args.out.with_suffix(".prompts.jsonl")
                await self._synthesize(answerer, path)
                conversations = self.selection.read([*self.args.prompts, path])
            self.tally.started = perf_counter()
            with progress(self.console) as bar:
                task = bar.add_task("answers", total=sum(len(c.turns) for c in conversations))

                def on_turn(turn: Turn) -> None:
                    self.tally.count(turn)
                    speed = f"answers  {self.tally.num_new_tokens / self.tally.seconds:,.0f} tokens/s"
                    bar.update(task, advance=turn.count, description=speed)

                await Writer(answerer, self.chat, recipe, file).answer_all(conversations, on_turn)

    async def _synthesize(self, answerer: Answerer, path: Path) -> None:
        args, chat = self.args, self.chat
        prefix = f"synthesised/{Path(args.target).name}/{args.seed}/"
        turns, benchmarks = user_turns(chat, args.system), self.selection.benchmarks
        synthesis = Synthesis(turns, args.seed, prefix, chat.special_ids, benchmarks)
        with PromptFile(path) as file, progress(self.console) as bar:
            task = bar.add_task("prompts", total=args.synthesize, completed=len(file.ids))

            def on_draw(refusal: Refusal | None) -> None:
                self.tally.refusals[refusal or "kept"] += 1
                bar.update(task, completed=len(file.ids))

            await synthesize(answerer, synthesis, file, args.synthesize, on_draw)


def prepare(
    args: Namespace, selection: Selection, conversations: Sequence[Conversation], console: Console
) -> tuple[Chat, dict[str, Any]]:
    """Write what is asked for; how the target is talked to, and the result for machines."""
    given = read_given(args.given)
    chat, opened, weights = open_endpoint(args) if args.endpoint else open_local(args, conversations)
    systems = [c.system for c in conversations] or [args.system]
    for system in {system is None: system for system in systems}.values():
        check_template(chat, system)
    recipe = Recipe(args.temperatures, args.max_new_tokens, args.top_k, args.seed, given, args.only_given)
    job = Job(args, selection, chat, console)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with AnswerFile(args.out) as file:
        Made(args.target, weights, settings(args)).beside(args.out, len(file.answers), say)
        try:
            asyncio.run(job.write(opened, conversations, recipe, file))
        except KeyboardInterrupt:
            say(f"{len(file.answers)} answers are kept in {args.out}; the same command goes on from there")
            raise
        refuse_empty(job, file)
        if args.compact:
            write_answers(args.compact, file.answers.values())
        say(summary(job, file))
        return chat, result(job, file)


def read_given(paths: Sequence[Path]) -> dict[str, Answer]:
    """Of answers with one id the first counts."""
    given: dict[str, Answer] = {}
    for path in paths:
        given = read_answers(path) | given
    return given


def settings(args: Namespace) -> dict[str, Any]:
    """What decides an answer, beside the target and the prompt."""
    return {
        "temperatures": list(args.temperatures),
        "top_k": args.top_k,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "written_by": args.endpoint or f"our engine in {args.dtype or 'float32'}",
    }


def open_local(args: Namespace, conversations: Sequence[Conversation]) -> tuple[Chat, Opened, str | None]:
    """How the target is talked to, who writes, and a fingerprint of the weights.

    There is room for the longest conversation, as far as the target goes.
    """
    target = load(args.target, args.dtype or "float32", args.device, args.trust_remote_code)
    chat = chat_of(target, dict(args.template_variables))
    longest = max(PROMPT_ROOM, longest_prompt(chat, conversations, args.max_new_tokens)) + args.max_new_tokens
    context = min(chat.context_len, longest)
    llm = LLM(target, method="ar", max_batch_size=args.batch_size, max_model_len=context)
    return replace(chat, context_len=context), nullcontext(Local(llm)), target.facts.weights


def open_endpoint(args: Namespace) -> tuple[Chat, Opened, None]:
    """As ``open_local``, but nobody knows its weights."""
    from secondguess.prepare.endpoint import Endpoint  # needs an extra

    chat = load_chat(args.target, args.trust_remote_code, dict(args.template_variables))
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    return chat, Endpoint(args.endpoint, args.model or args.target, key or None, chat, args.batch_size), None


def refuse_empty(job: Job, file: AnswerFile) -> None:
    """The first token of an answer comes from prefill and is never drafted: an answer of one trains nothing."""
    if all(len(answer.tokens) < 2 for answer in file.answers.values()):
        why = "; ".join(left_out(job)) or "is the chat template this target's?"
        none = f"none of the {len(file.answers)} answers in {file.path} has a token to train on"
        raise UserError(f"all-zero mask: {none}: {why}")


def summary(job: Job, file: AnswerFile) -> str:
    tally = job.tally
    said = [f"{len(file.answers)} answers in {file.path}, {tally.num_tokens} tokens of this run's conversations"]
    if tally.num_new_tokens:
        said.append(f"{tally.num_new_tokens / tally.seconds:,.0f} tokens/s")
    if tally.refusals:
        said.append("prompts drawn: " + ", ".join(f"{reason} {n}" for reason, n in tally.refusals.most_common()))
    return "; ".join(said + left_out(job))


def left_out(job: Job) -> list[str]:
    limit = f"{job.chat.context_len} tokens, the target's limit" + ", or the server's" * bool(job.args.endpoint)
    reasons = {
        "too long": f"no room for an answer of up to {job.args.max_new_tokens} in {limit}",
        "unknown": "tokens of the answer not certain",
        "not given": "--given has no answer",
    }
    return [f"{n} turns left out: {why}" for outcome, why in reasons.items() if (n := job.tally.outcomes[outcome])]


def result(job: Job, file: AnswerFile) -> dict[str, Any]:
    answers, tally, ends = file.answers.values(), job.tally, job.chat.end_ids
    return {
        "out": str(file.path),
        "num_answers": len(answers),
        "num_answer_tokens": sum(len(a.tokens) for a in answers),
        "num_ended": sum(not ends.isdisjoint(a.tokens[-1:]) for a in answers),
        "num_at_temperature": {f"{t:g}": n for t, n in sorted(Counter(a.temperature for a in answers).items())},
        "turns_of_this_run": dict(tally.outcomes),
        "prompts_drawn": dict(tally.refusals),
        "num_new_tokens": tally.num_new_tokens,
        "seconds": round(tally.seconds, 3),
        "tokens_per_second": tally.num_new_tokens / tally.seconds,
    }
