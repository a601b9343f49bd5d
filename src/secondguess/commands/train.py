"""``secondguess train``: from the target's own answers to a drafter, in one command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.commands.record import add_json, make_record, write_json
from secondguess.device import choose_device
from secondguess.errors import UserError

if TYPE_CHECKING:
    from secondguess.train.config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from secondguess.train.config import list_settings

    several = "several GPUs or processes: torchrun --nproc-per-node N -m secondguess train ..."
    parser.epilog = f"{list_settings()}\n\n{several}"
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
    work(config, args.dry_run, args.json)
    return 0


def work(config: TrainConfig, dry_run: bool, json: Path | None) -> None:
    """In this process, or in this one of those that torchrun started."""
    from rich.console import Console

    from secondguess.commands.train_run import capture, describe, estimate, train
    from secondguess.train.parallel import processes
    from secondguess.train.setup import prepare

    device = choose_device(config.device)
    with processes(device) as group:
        console = Console(stderr=True, highlight=False, markup=False, quiet=not group.first)
        record = make_record() | {"num_processes": group.count}  # each has the threads that the record names
        setup = prepare(config, record, console.print, device, group)
        console.print(describe(setup), soft_wrap=True)
        if dry_run:
            console.print(estimate(setup), soft_wrap=True)
            return
        if not setup.trainer.finished:
            if setup.captures and group.first:
                capture(setup.captures, console, setup.captures.fill)
            group.wait()
            train(setup.trainer, console)
        if json and group.first:
            write_json(json, record, "rows", setup.trainer.folder.log_lines())
