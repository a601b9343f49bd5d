"""``secondguess generate``: continue prompts with one or more decoding methods."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from secondguess.commands.options import add_dataclass, add_drafter, add_dtype, add_target, from_args
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.methods import METHODS, SHAPE, WITH_DRAFTER, parse_method, refuse_unused, split_methods
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from secondguess.commands.show_table import Run
    from secondguess.llm import LLM

# The one has another name, the next no form on a command line, the others no place in what is shown.
NOT_FLAGS = {"max_tokens", "logit_bias", "logprobs", "prompt_logprobs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="text to answer; - reads it from standard input")
    methods = f"comma-separated: {', '.join(METHODS)}, with settings if wanted (pr:budget=24,m=2)"
    parser.add_argument("--method", default="pr", help=f"{methods} (default: pr)")
    add_drafter(parser)
    add_dtype(parser)
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--show-tree", action="store_true", help="draw the last draft tree of each answer")
    add_json(parser)
    add_dataclass(parser, TreeConfig, SHAPE)
    add_sampling(parser, 128)


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How the tokens of an answer are chosen, and how many by default."""
    names, most = ("--max-new-tokens", "--max-tokens"), f"new tokens of an answer, at most (default: {max_new_tokens})"
    parser.add_argument(*names, type=int, default=max_new_tokens, metavar="INT", help=most)
    add_dataclass(parser, SamplingParams, {field.name for field in fields(SamplingParams)} - NOT_FLAGS)


def run(args: argparse.Namespace) -> int:
    tree, params = from_args(TreeConfig, args), from_args(SamplingParams, args, max_tokens=args.max_new_tokens)
    methods = [parse_method(text, tree) for text in split_methods(args.method)]
    refuse_unused(methods, tree)
    if not any(method.has_drafter for method in methods):
        for flag in ("drafter", "show_tree"):
            if getattr(args, flag):
                raise UserError(f"--{flag.replace('_', '-')} needs one of the methods {', '.join(WITH_DRAFTER)}")
    prompts = [read_prompt(text) for text in args.prompts]
    runs = generate(args, [method.typed for method in methods], prompts, tree, params)
    if args.json:
        from secondguess.commands.show_table import result

        write_json(args.json, make_record(), "results", [result(run) for run in runs])
    return 0


def read_prompt(text: str) -> str:
    """The prompt as given, or standard input without its last line end."""
    try:
        prompt = sys.stdin.read().removesuffix("\n") if text == "-" else text
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8 text") from None
    if not prompt:
        raise UserError("a prompt is empty: give it some text")
    return prompt


def generate(
    args: argparse.Namespace, methods: list[str], prompts: list[str], tree: TreeConfig, params: SamplingParams
) -> list[Run]:
    from secondguess.commands.compare import load, make_llms, prompt_ids, stdout_console
    from secondguess.commands.show_text import legend

    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    ids = [prompt_ids(target, prompt, args.raw) for prompt in prompts]
    llms = make_llms(target, methods, tree, max(map(len, ids)) + params.max_tokens, args.drafter)
    console, runs = stdout_console(), []
    for prompt, tokens in zip(prompts, ids, strict=True):
        if len(prompts) > 1:
            console.print(f"\n{prompt}", style="bold", markup=False)
        # Drawn here, so that all methods draw the same noise.
        seed = secrets.randbits(32) if params.seed is None else params.seed
        runs += answer(console, llms, prompt, tokens, replace(params, seed=seed), args.show_tree)
    if any(method != "ar" for method in methods):
        console.print("", legend(), sep="\n")
    return runs


def answer(
    console: Console, llms: dict[str, LLM], prompt: str, ids: list[int], params: SamplingParams, show_tree: bool
) -> list[Run]:
    """One prompt by every method, and the table that compares them."""
    from secondguess.commands.compare import stream
    from secondguess.commands.show_table import table
    from secondguess.commands.show_tree import KEY, draw_tree

    runs = []
    for llm in llms.values():
        run = stream(console, llm, prompt, ids, params)
        if show_tree and run.trace and llm.method.has_drafter:
            tokenizer: Any = llm.target.tokenizer
            console.print(f"last draft tree: {KEY}", draw_tree(run.trace, tokenizer.decode), "", sep="\n")
        runs.append(run)
    console.print(table({run.method: [run] for run in runs}))
    if params.temperature:
        console.print(f"seed {params.seed} (--seed {params.seed} repeats it)")
    return runs
