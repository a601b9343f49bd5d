"""``secondguess train``: from the target's own answers to a drafter, in one command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from secondguess.commands.record import add_json, make_record, write_json
from secondguess.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from secondguess.train.config import list_settings

    parser.epilog = list_settings()
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of training settings")
    parser.add_argument("--print-config", action="store_true", help="print the settings in full and stop")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be done, and stop")
    add_json(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")


def run(args: argparse.Namespace) -> int:
    from secondguess.train.config import dump_config, load_config

    if args.json and (args.print_config or args.dry_run):
        raise UserError("--json writes the log of a run: leave out --print-config and --dry-run")
    config = load_config(args.config, args.overrides)
    if args.print_config:
        sys.stdout.write(dump_config(config))  # as it is: rich would wrap lines and take brackets for markup
        return 0

    from rich.console import Console

    from secondguess.commands.train_run import capture, describe, train
    from secondguess.train.setup import prepare

    console = Console(stderr=True, highlight=False, markup=False)
    record = make_record()
    setup = prepare(config, record, console.print)
    console.print(describe(setup), soft_wrap=True)
    if args.dry_run:
        return 0
    capture(setup, console)
    train(setup.trainer, console)
    if args.json:
        write_json(args.json, record, "rows", setup.trainer.folder.log_lines())
    return 0
