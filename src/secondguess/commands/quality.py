"""``secondguess quality``: what numbers of fewer bits change of a target, beside llama.cpp's."""

from __future__ import annotations

import argparse

from secondguess.bench.peers.known import KNOWN
from secondguess.commands.options import add_device, add_target
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.commands.workload import add_replay_batch, add_sources, check_numbers, comma_separated
from secondguess.errors import UserError, did_you_mean

DTYPES = ("float32", "bfloat16", "int8", "int4")
WITH_LOGITS = tuple(name for name, known in KNOWN.items() if known.engine == "llama.cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = comma_separated(str)
    parser.epilog = "Right answers are those whose last number is the reference's: for tasks like gsm8k."
    add_target(parser)
    forms = f"numbers to compare with float32 (default: {','.join(DTYPES)})"
    parser.add_argument("--dtypes", type=words, default=DTYPES, metavar="NAME,...", help=forms)
    peers = f"the same of llama.cpp: {', '.join(WITH_LOGITS)}"
    parser.add_argument("--peers", type=words, default=(), metavar="NAME,...", help=peers)
    parser.add_argument("--tasks", type=words, default=("gsm8k",), help="names or JSONL files (default: gsm8k)")
    parser.add_argument("--limit", type=int, metavar="INT", help="prompts per task, evenly spaced (default: all)")
    add_sources(parser)
    add_device(parser)
    add_replay_batch(parser)
    add_json(parser)
    parser.set_defaults(temperatures=(0.0,))


def run(args: argparse.Namespace) -> int:
    check_numbers(args)
    for dtype in args.dtypes:
        if dtype not in DTYPES:
            raise UserError(f"unknown dtype {dtype!r}{did_you_mean(dtype, DTYPES)}; choose of {', '.join(DTYPES)}")
    for name in args.peers:
        if name not in WITH_LOGITS:
            raise UserError(f"peer {name} shows no logits: choose of {', '.join(WITH_LOGITS)}")

    from rich.console import Console

    from secondguess.bench.tasks import load_tasks
    from secondguess.commands.compare import stdout_console
    from secondguess.commands.quality_run import assess
    from secondguess.commands.show_quality import rich_table

    tasks = load_tasks(args.tasks, args.data_dir, args.limit, args.seed)
    rows = assess(args, tasks, Console(stderr=True, highlight=False))
    if args.json:
        write_json(args.json, make_record(), "rows", rows)
    stdout_console().print(rich_table(rows))
    return 0
