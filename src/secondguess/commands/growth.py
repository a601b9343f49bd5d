"""``secondguess growth``: a cycle's time against budget, batch, context and draft vocabulary, beside a model's line."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from secondguess.commands.options import add_dtype, add_target
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.errors import UserError, install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--drafter", help="folder, or name of one that ships (default: pr)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also draw growth.png and growth.svg there")
    add_dtype(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    plots = import_plots() if args.out else None

    from rich.console import Console

    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.growth_run import grow, rich_table

    record = make_record()
    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    rows = grow(target, args.drafter, Console(stderr=True, highlight=False))
    if args.json:
        write_json(args.json, record, "rows", rows)
    if plots:
        args.out.mkdir(parents=True, exist_ok=True)
        plots.save(plots.draw(rows, f"{args.target}, {args.dtype}"), args.out, "growth")
    stdout_console().print(rich_table(rows))
    return 0


def import_plots() -> ModuleType:
    try:
        from secondguess.commands import plot_growth
    except ImportError as error:
        raise UserError(f"figures need matplotlib: {install('plots')}; or leave out --out") from error
    return plot_growth
