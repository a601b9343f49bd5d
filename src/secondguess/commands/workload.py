"""The flags that commands over tasks share: methods and tree shapes, tasks, temperatures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from secondguess.bench.tasks import ALL, DATA_VARIABLE, TASKS, TaskPrompt, load_tasks
from secondguess.commands.options import add_dataclass, add_drafter, add_dtype, add_target, either, from_args
from secondguess.config import TreeConfig
from secondguess.errors import UserError, require
from secondguess.methods import METHODS, Method, refuse_unused, split_methods
from secondguess.types import SamplingParams

T = TypeVar("T")

MAX_BATCH = 4096
DEFAULT_TASKS = ("gsm8k", "mt_bench", "humaneval")


def add_workload(parser: argparse.ArgumentParser, more: str, method: str = "ar,eagle3.1,pr") -> None:
    """``more`` is what the help of ``--method`` adds, ``method`` its default."""
    add, words, floats = parser.add_argument, comma_separated(str), comma_separated(float)
    add_target(parser)
    methods = f"comma-separated: {', '.join(METHODS)}, with settings if wanted (pr:m=0); {more}"
    add("--method", default=method, help=f"{methods} (default: {method})")
    tasks = f"comma-separated: {', '.join(TASKS)}, or paths of JSONL files"
    add("--tasks", type=words, default=DEFAULT_TASKS, help=f"{tasks} (default: {','.join(DEFAULT_TASKS)})")
    add("--limit", type=int, metavar="INT", help="prompts per task, evenly spaced, shifted by the seed (default: all)")
    add_texts(parser)
    budget = "draft tokens verified per cycle; auto: as many as pay, bench only (default: 48)"
    budgets = comma_separated(either(int, "auto"))
    add("--budget", dest="budgets", type=budgets, default=(48,), metavar="INT or auto,...", help=budget)
    baseline = "each with its own baseline (default: 0)"
    add("--temperature", dest="temperatures", type=floats, default=(0.0,), metavar="FLOAT,...", help=baseline)
    add_drafter(parser)
    add_dataclass(parser, TreeConfig, ("grow_width", "offer_width", "num_steps", "num_reconsider"))


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Where prompts come from, and what fixes the texts that are written to them."""
    add_sources(parser)
    add_dtype(parser)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """As ``add_texts``, but for what the target computes with."""
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        help=f"folder of the named tasks' files (default: what {DATA_VARIABLE} names, else the hub)",
    )
    add("--max-new-tokens", type=int, default=128, metavar="INT", help="new tokens at most (default: 128)")
    add("--seed", type=int, default=0, metavar="INT", help="of all draws; each prompt has its own from it (default: 0)")


def add_replay_batch(parser: argparse.ArgumentParser) -> None:
    together = "texts decoded or replayed together; changes no result (default: 16)"
    parser.add_argument("--batch-size", type=int, default=16, metavar="INT", help=together)


def add_groups(parser: argparse.ArgumentParser) -> None:
    """``groups``: pairs of a name and the names of its tasks."""
    what = "rows over several tasks together, all their prompts pooled: code=humaneval,mbpp; may be repeated"
    named = {"dest": "groups", "metavar": "NAME=TASK,...", "help": what}
    parser.add_argument("--group", type=group, action="append", default=[], **named)


def group(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, tasks = text.partition("=")
    members = tuple(task.strip() for task in tasks.split(","))
    if not (name and all(members)):
        raise argparse.ArgumentTypeError(f"must be NAME=TASK,..., got {text!r}")
    return name, members


def comma_separated(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    parse.__name__ = f"comma-separated {kind.__name__}"  # argparse says "invalid NAME value"
    return parse


def check(args: argparse.Namespace) -> tuple[list[Method], list[TaskPrompt]]:
    """Find every mistake that can be found before the target is loaded."""
    from secondguess.bench.plan import line_up

    check_numbers(args)
    trees = [from_args(TreeConfig, args, budget=budget) for budget in args.budgets]
    methods = line_up(split_methods(args.method), trees)
    for tree in trees:
        refuse_unused(methods, tree)
    return methods, load_tasks(args.tasks, args.data_dir, args.limit, args.seed)


def check_numbers(args: argparse.Namespace) -> None:
    """Counts, temperatures and what else fixes the texts, as far as a command has them."""
    for name in ("batch_size", "limit", "live_limit", "rounds"):
        if getattr(args, name, None) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.batch_size > MAX_BATCH:
        raise UserError(f"--batch-size must be at most {MAX_BATCH}, got {args.batch_size}")
    for temperature in args.temperatures or (0.0,):
        SamplingParams(temperature=temperature, seed=args.seed, max_tokens=args.max_new_tokens)


def check_drafting(args: argparse.Namespace) -> tuple[list[Method], list[TaskPrompt]]:
    """As ``check``, for replay: plain decoding is left out. Raises UserError if no other method was named."""
    methods, prompts = check(args)
    drafting = [m for m in methods if m.name != "ar"]
    if not drafting:
        raise UserError("nothing to replay: name a method that drafts")
    if any(m.tree.budget == "auto" for m in drafting):
        raise UserError("budget auto weighs time, and a replay takes none: give a number, or use bench")
    return drafting, prompts


def check_groups(groups: Sequence[tuple[str, Sequence[str]]], tasks: Sequence[str]) -> dict[str, Sequence[str]]:
    """Raises UserError for a name that is taken, and for a task that is not among ``tasks``."""
    found: dict[str, Sequence[str]] = {}
    for name, members in groups:
        require(name not in (*tasks, *found, ALL), f"--group {name}: this name is taken, choose another")
        lacking = [task for task in members if task not in tasks]
        require(not lacking, f"--group {name}: no task {', '.join(lacking)}; there are {', '.join(tasks)}")
        found[name] = members
    return found


def check_against(typed: str | None, methods: Sequence[str]) -> str:
    """The method that others are compared with, the first by default. Raises UserError when it does not take part."""
    taking_part = f"none of the methods that draft: {', '.join(methods)}"
    require(typed is None or typed in methods, f"--against {typed} is {taking_part}")
    return typed or methods[0]
