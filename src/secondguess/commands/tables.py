"""``secondguess tables``: what ``eval`` wrote, as tables in Markdown. Nothing is decoded or replayed."""

from __future__ import annotations

import argparse
from pathlib import Path

from secondguess.commands.workload import add_groups, check_against, check_groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what eval --json wrote")
    against = "the method that gains are counted over, at the same budget (default: as eval did)"
    parser.add_argument("--against", metavar="METHOD", help=against)
    add_groups(parser)


def run(args: argparse.Namespace) -> int:
    from secondguess.bench.evaluation import read
    from secondguess.commands.compare import stdout_console
    from secondguess.commands.markdown_eval import markdown

    evaluations, counted_over = read(args.file)
    against = check_against(args.against or counted_over, list(dict.fromkeys(r.method for r in evaluations[0].runs)))
    groups = check_groups(args.groups, list(dict.fromkeys(evaluations[0].tasks)))
    text = "\n\n".join(markdown(evaluation, against, groups) for evaluation in evaluations)
    stdout_console().print(text, markup=False, soft_wrap=True)
    return 0
