"""``secondguess card``: what a drafter's model card says, kept in the checkpoint, and the card."""

from __future__ import annotations

import argparse
from pathlib import Path

from secondguess.errors import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "What was said before stays. 'secondguess export' writes the same into the card of what it exports."
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="of the drafter: README.md and config.json in it are written")
    add("--data", metavar="TEXT", help="what it was trained on, in a sentence or two")
    add("--licence", metavar="ID", help="as the hub writes it: apache-2.0")
    add("--measured", metavar="FILE", type=Path, help="what 'secondguess eval --json' wrote of the drafter")
    add("--base-model", metavar="NAME", help="the target's name for other engines (default: as it was trained with)")


def run(args: argparse.Namespace) -> int:
    from secondguess.commands.compare import stdout_console
    from secondguess.drafter.card import method_of
    from secondguess.drafter.export import write_card
    from secondguess.drafter.measured import read_measured
    from secondguess.drafter.settings import add_note, read_settings

    for flag in ("data", "licence"):
        require(getattr(args, flag) != "", f"--{flag} is empty: leave it out, or say something")
    shape, block = read_settings(args.folder)
    said = {flag: text for flag in ("data", "licence") if (text := getattr(args, flag))}
    if args.measured:
        said["measured"] = read_measured(args.measured, method_of(shape, block))
    if said:
        add_note(args.folder, "card", block.get("card", {}) | said)
    write_card(args.folder, args.base_model)
    stdout_console().print(f"card written to {args.folder / 'README.md'}", markup=False, soft_wrap=True)
    return 0
