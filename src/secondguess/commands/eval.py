"""``secondguess eval``: tau and acceptance of drafters by replay over plain decoding's texts; nothing is timed."""

from __future__ import annotations

import argparse

from secondguess.bench.sweep import BASELINE, OTHER, sweep
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.commands.workload import (
    add_groups,
    add_replay_batch,
    add_workload,
    check_against,
    check_drafting,
    check_groups,
)
from secondguess.methods import split_methods

TABLE_WIDTH = 110  # at least: a narrower terminal breaks lines rather than numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, "what drafts nothing is left out")
    add_replay_batch(parser)
    against = "the method that gains are counted over, at the same budget (default: the first)"
    parser.add_argument("--against", metavar="METHOD", help=against)
    add_groups(parser)
    every = f"add {BASELINE} with every value of every tree switch, and {OTHER} and {BASELINE} with other widths and "
    every += f"steps; count gains over {BASELINE}, and compare both at their best"
    parser.add_argument("--sweep", action="store_true", help=every)
    before = "check all that needs neither target nor drafters, and stop"
    parser.add_argument("--dry-run", action="store_true", help=before)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.sweep:
        args.method = ",".join(dict.fromkeys([*split_methods(args.method), *sweep(args.offer_width)]))
        args.against = args.against or BASELINE
    methods, prompts = check_drafting(args)
    against = check_against(args.against, list(dict.fromkeys(m.typed for m in methods)))
    groups = check_groups(args.groups, list(dict.fromkeys(p.task for p in prompts)))
    if args.dry_run:
        return 0

    from rich.console import Console

    from secondguess.bench.best import duels
    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.eval_run import evaluate
    from secondguess.commands.show_eval import rich_tables, said_of

    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    found = evaluate(args, target, methods, prompts, Console(stderr=True, highlight=False))
    rows = [row for evaluation in found for row in evaluation.rows(against, groups)]
    best = [duel for evaluation in found for duel in duels(evaluation)]
    if args.json:
        counted = [evaluation.to_json() for evaluation in found]
        write_json(args.json, make_record(), "rows", rows, best=best, against=against, evaluations=counted)
    console = stdout_console()
    console.width = max(console.width, TABLE_WIDTH)
    for table in rich_tables(rows, against):
        console.print(table, "")
    for duel in best:
        console.print(said_of(duel), soft_wrap=True, markup=False)
    return 0
