"""``secondguess trace``: every cycle's draft tree and what became of it, in a file."""

from __future__ import annotations

import argparse
from functools import partial

from secondguess.commands.record import add_json, make_record, output_file, write_json
from secondguess.commands.workload import add_replay_batch, add_workload, check_drafting

START = b'{"task": '  # of every file that Tracer wrote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, "what drafts nothing is left out", method="pr")
    add_replay_batch(parser)
    out = "JSONL file: a line per text and cycle; 'secondguess tree FILE' draws one"
    parser.add_argument("--out", type=partial(output_file, start=START), required=True, metavar="FILE", help=out)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    methods, prompts = check_drafting(args)

    from rich.console import Console

    from secondguess.commands.compare import load
    from secondguess.commands.trace_run import trace

    console = Console(stderr=True, highlight=False)
    rows = trace(args, load(args.target, args.dtype, args.device, args.trust_remote_code), methods, prompts, console)
    if args.json:
        write_json(args.json, make_record(), "rows", rows)
    cycles = sum(row["num_cycles"] for row in rows)
    console.print(f"{cycles} cycles are in {args.out}", markup=False, soft_wrap=True)
    return 0
