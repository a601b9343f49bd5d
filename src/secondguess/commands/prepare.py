"""``secondguess prepare``: training data, the target's own answers to prompts."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

from secondguess.atomic import check_folder
from secondguess.bench.tasks import TASKS, load_tasks
from secondguess.commands.options import add_dtype
from secondguess.commands.progress import progress
from secondguess.commands.workload import comma_separated
from secondguess.errors import UserError
from secondguess.prepare.overlap import Index
from secondguess.prepare.prompts import Conversation, read_conversations
from secondguess.types import SamplingParams

CONTEXT = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, words, floats = parser.add_argument, comma_separated(str), comma_separated(float)
    add("target", metavar="TARGET", help="folder, hub id, .gguf file, or smollm2-135m")
    formats = ".jsonl with turns, messages or conversations in each line, or .txt with a prompt a line"
    add("prompts", metavar="FILE", nargs="+", type=Path, help=formats)
    add("--out", type=Path, required=True, metavar="FILE", help="answers, for train; answers that it holds are kept")
    add("--limit", type=int, metavar="INT", help="conversations, evenly spaced over the files (default: all)")
    mix = "a conversation has one of these, drawn by its id (default: 0,1)"
    add("--temperature", dest="temperatures", type=floats, default=(0.0, 1.0), metavar="FLOAT,...", help=mix)
    add("--top-k", type=int, default=0, metavar="INT", help="where the temperature is not 0; 0 keeps all (default: 0)")
    add("--max-new-tokens", type=int, default=256, metavar="INT", help="of one answer (default: 256)")
    add("--system", help="system prompt of conversations that have none (default: the chat template's own)")
    add("--seed", type=int, default=0, metavar="INT", help="of all draws (default: 0)")
    add("--batch-size", type=int, default=32, metavar="INT", help="answers decoded together (default: 32)")
    refuse = f"tasks whose text no prompt may share 13 words with: {', '.join(TASKS)}, or JSONL files"
    add("--refuse-overlap", type=words, default=(), metavar="TASK,...", help=refuse)
    add("--leave-out-overlap", action="store_true", help="go on without such prompts instead of stopping at one")
    add("--data-dir", type=Path, help="folder of the named tasks' files")
    add("--given", type=Path, metavar="FILE", help="answers to take as they are, as --compact wrote them")
    add("--compact", type=Path, metavar="FILE", help="also write all answers without their prompts (safetensors)")
    add_dtype(parser)


def run(args: argparse.Namespace) -> int:
    conversations = check(args)

    from rich.console import Console

    from secondguess.commands.compare import load
    from secondguess.llm import LLM
    from secondguess.prepare.answers import AnswerFile, Recipe, answer_all
    from secondguess.prepare.compact import answer_of, read_answers, write_answers

    given = read_answers(args.given) if args.given else {}
    target = load(args.target, args.dtype)
    if not target.tokenizer.chat_template:
        raise UserError(f"{args.target} has no chat template: a base model does not answer")
    file = AnswerFile(args.out)
    recipe = Recipe(args.temperatures, args.max_new_tokens, args.top_k, args.seed, given)
    context = min(target.spec.context_len, max(CONTEXT, 2 * args.max_new_tokens))
    llm = LLM(target, method="ar", max_batch_size=args.batch_size, max_model_len=context)
    stderr = Console(stderr=True, highlight=False)
    tokens = 0
    with progress(stderr) as bar:
        task = bar.add_task("answers", total=sum(len(c.turns) for c in conversations))

        def count(n: int) -> None:
            nonlocal tokens
            tokens += n
            bar.advance(task)

        asyncio.run(answer_all(llm, conversations, recipe, file, count))
    if args.compact:
        lines = args.out.read_bytes().splitlines()
        write_answers(args.compact, (answer_of(json.loads(line)) for line in lines))
    stderr.print(
        f"{len(file.answers)} answers in {args.out}, {tokens} tokens of this run's conversations", markup=False
    )
    return 0


def check(args: argparse.Namespace) -> list[Conversation]:
    """The conversations to answer; every mistake that can be found before the target is loaded."""
    for temperature in args.temperatures:
        SamplingParams(temperature=temperature, top_k=args.top_k, seed=args.seed, max_tokens=args.max_new_tokens)
    for name in ("batch_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    check_folder(args.out.parent)
    conversations = read_conversations(args.prompts)
    if args.limit is not None and args.limit < len(conversations):
        conversations = [conversations[i * len(conversations) // args.limit] for i in range(args.limit)]
    conversations = without_overlap(conversations, args.refuse_overlap, args.data_dir, args.leave_out_overlap)
    # In an order that mixes the files, so that what an interrupted run has is a fair sample.
    conversations.sort(key=lambda c: hashlib.sha256(c.id.encode()).digest())
    return [replace(c, system=args.system) if c.system is None else c for c in conversations]


def without_overlap(
    conversations: list[Conversation], tasks: tuple[str, ...], data_dir: Path | None, leave_out: bool
) -> list[Conversation]:
    """Those that share no 13 words in a row with a task's text. Raises UserError naming the first that does, unless
    they are to be left out.
    """
    if not tasks:
        return conversations
    index, kept = Index(turn for prompt in load_tasks(tasks, data_dir) for turn in prompt.turns), []
    for conversation in conversations:
        shared = next(filter(None, map(index.shared, conversation.turns)), None)
        if shared is None:
            kept.append(conversation)
        elif not leave_out:
            raise UserError(f"prompt {conversation.id} shares {shared!r} with a benchmark: give --leave-out-overlap")
    return kept
