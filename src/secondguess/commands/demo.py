"""``secondguess demo``: three prompts decoded plainly, with EAGLE-3.1 and with PR."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from secondguess.commands.record import add_json, make_record, write_json
from secondguess.config import TreeConfig
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from secondguess.commands.show_table import Run

TARGET = "smollm2-135m"
METHODS = ("ar", "eagle3.1", "pr")
PROMPTS = (
    "A pizza is cut into 8 slices. Four friends share 2 pizzas equally. How many slices does each friend get? "
    "Explain step by step.",
    "I have never run before. How should I train for my first 5 km run?",
    "Write a Python function that takes a list of numbers and returns its mean and its median.",
)
# Fastest on two CPU cores, where every verified token costs arithmetic: four rows with the root. GPUs take more.
TREE = TreeConfig(budget=3, num_steps=3)
# Answers of one length, so that no method is measured on a few tokens.
PARAMS = SamplingParams(max_tokens=96, min_tokens=96, seed=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from secondguess.commands.compare import stdout_console
    from secondguess.commands.show_table import num_identical, result, table
    from secondguess.commands.show_text import legend

    console = stdout_console()
    by_method = decode(console)
    console.print(legend(), "", table(by_method), "", sep="\n")
    if args.json:
        rows = [result(run) for runs in zip(*by_method.values(), strict=True) for run in runs]
        write_json(args.json, make_record(), "results", rows)
    lossy = [method for method, runs in by_method.items() if num_identical(runs, by_method["ar"]) < len(runs)]
    if lossy:
        console.print(
            f"{' and '.join(lossy)} did not write plain decoding's tokens: this should not happen, please report it"
        )
        return 1
    console.print(f'Next: {program()} generate {TARGET} "your own question" --show-tree', soft_wrap=True)
    return 0


def decode(console: Console) -> dict[str, list[Run]]:
    from secondguess.commands.compare import load, make_llms, prompt_ids, stream

    target = load(TARGET)
    ids = [prompt_ids(target, prompt) for prompt in PROMPTS]
    llms = make_llms(target, METHODS, TREE, max(map(len, ids)) + PARAMS.max_tokens)
    by_method: dict[str, list[Run]] = {method: [] for method in METHODS}
    for prompt, tokens in zip(PROMPTS, ids, strict=True):
        console.print(f"\n{prompt}", style="bold", markup=False)
        for method, llm in llms.items():
            by_method[method].append(stream(console, llm, prompt, tokens, PARAMS))
    return by_method


def program() -> str:
    """This program as the user called it: ``make demo`` leaves it out of the search path."""
    return sys.argv[0] if sys.argv[0].endswith("secondguess") else "secondguess"
