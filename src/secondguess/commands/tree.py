"""``secondguess tree``: draw one cycle of a trace."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what 'secondguess trace' wrote")
    parser.add_argument("--id", required=True, help="id of the prompt")
    parser.add_argument("--cycle", type=int, default=1, metavar="INT", help="from 1 (default: 1)")


def run(args: argparse.Namespace) -> int:
    from secondguess.bench.trace import find, trace_of
    from secondguess.commands.compare import stdout_console
    from secondguess.commands.show_tree import KEY, draw_tree

    lines = find(args.file, args.id, args.cycle)
    console = stdout_console()
    console.print(KEY)
    for line in lines:
        shape = f"{line.method}, B = {line.budget}, T = {line.temperature:g}"
        console.print(f"\n{line.task} {line.id}, {shape}, cycle {line.cycle}, root at token {line.root}", markup=False)
        texts = dict(zip(line.tokens + line.emitted, line.pieces + line.emitted_pieces, strict=True))
        console.print(draw_tree(trace_of(line), texts.__getitem__))
    return 0
