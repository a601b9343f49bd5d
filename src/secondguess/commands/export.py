"""``secondguess export``: a drafter in the form that another engine loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from secondguess.errors import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafter", metavar="DRAFTER", help="folder, hub id, or name of one that ships (smollm2-135m/pr)")
    forms = "eagle3: for vLLM and SGLang; speculators: for 'vllm serve DIR'"
    add("--to", dest="form", required=True, choices=("eagle3", "speculators"), help=forms)
    add("folder", type=Path, metavar="DIR", help="new folder")
    add("--base-model", metavar="NAME", help="the target's name for other engines (default: as it was trained with)")
    limit = "how far the drafter goes, where the checkpoint does not say (the target's context)"
    add("--max-positions", type=int, metavar="INT", help=limit)


def run(args: argparse.Namespace) -> int:
    require(args.max_positions is None or args.max_positions > 0, "--max-positions must be at least 1")

    from secondguess.commands.compare import stdout_console
    from secondguess.drafter.export import export
    from secondguess.drafter.shipped import find_alone

    source = find_alone(args.drafter)
    remarks = export(source, args.form, args.folder, args.base_model, args.max_positions)
    console = stdout_console()
    for line in (*remarks, f"{args.form} drafter written to {args.folder}; README.md says how to serve it"):
        console.print(line, markup=False, soft_wrap=True)
    return 0
