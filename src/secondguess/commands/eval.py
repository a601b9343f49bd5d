"""``secondguess eval``: tau and acceptance of drafters by replay over plain decoding's texts; nothing is timed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from secondguess.bench.sweep import BASELINE, sweep
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.commands.workload import add_replay_batch, add_workload, check_drafting
from secondguess.errors import UserError
from secondguess.methods import split_methods

if TYPE_CHECKING:
    from secondguess.methods import Method


TABLE_WIDTH = 110  # at least: a narrower terminal breaks lines rather than numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, "what drafts nothing is left out")
    add_replay_batch(parser)
    against = "the method that gains are counted over, at the same budget (default: the first)"
    parser.add_argument("--against", metavar="METHOD", help=against)
    every = f"add {BASELINE} with every value of every tree switch, and count gains over {BASELINE}"
    parser.add_argument("--sweep", action="store_true", help=every)
    before = "check all that needs neither target nor drafters, and stop"
    parser.add_argument("--dry-run", action="store_true", help=before)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.sweep:
        args.method = ",".join(dict.fromkeys([*split_methods(args.method), BASELINE, *sweep(args.offer_width)]))
        args.against = args.against or BASELINE
    methods, prompts = check_drafting(args)
    against = baseline(methods, args.against)
    if args.dry_run:
        return 0

    from rich.console import Console

    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.eval_run import evaluate
    from secondguess.commands.show_eval import rich_tables

    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    rows = evaluate(args, target, methods, against, prompts, Console(stderr=True, highlight=False))
    if args.json:
        write_json(args.json, make_record(), "rows", rows)
    console = stdout_console()
    console.width = max(console.width, TABLE_WIDTH)
    for table in rich_tables(rows, against):
        console.print(table, "")
    return 0


def baseline(methods: list[Method], typed: str | None) -> str:
    """The method that others are compared with. Raises UserError when it does not take part."""
    names = list(dict.fromkeys(m.typed for m in methods))
    if typed is not None and typed not in names:
        raise UserError(f"--against {typed} is none of the methods that draft: {', '.join(names)}")
    return typed or names[0]
