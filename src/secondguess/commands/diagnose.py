"""``secondguess diagnose``: Figure 1, Table 7 and more of what a second look does, on one's own target and drafter."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.atomic import check_folder
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.commands.workload import add_replay_batch, add_workload, check_drafting
from secondguess.errors import UserError, install

if TYPE_CHECKING:
    from secondguess.methods import Method


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, "one that reconsiders", method="pr")
    add_replay_batch(parser)
    out = "folder for the figures (PNG and SVG), table7.md and diagnosis.json with every number in them"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    methods, prompts = check_drafting(args)
    method = the_one(methods, args.temperatures)
    check_folder(args.out)
    if find_spec("matplotlib") is None:
        raise UserError(f"the figures need matplotlib: {install('plots')}")

    from rich.console import Console

    from secondguess.bench.diagnosis import results
    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.diagnose_run import look, write
    from secondguess.commands.show_diagnosis import rich_tables

    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    args.out.mkdir(parents=True, exist_ok=True)
    diagnosis = look(args, target, method, prompts, Console(stderr=True, highlight=False))
    tasks = ", ".join(dict.fromkeys(prompt.task for prompt in prompts))
    shape = f"{method.typed}, B = {method.tree.budget}, T = {args.temperatures[0]:g}"
    setting = f"{shape}, {sum(len(p.turns) for p in prompts)} prompts of {tasks}"
    record = make_record()
    write(diagnosis, setting, record, args.out)
    if args.json:
        write_json(args.json, record, "results", results(diagnosis))
    console = stdout_console()
    for table in rich_tables(diagnosis):
        console.print(table, "")
    console.print(f"{setting}: figures and numbers are in {args.out}", markup=False, soft_wrap=True)
    return 0


def the_one(methods: list[Method], temperatures: tuple[float, ...]) -> Method:
    """Raises UserError unless there is one method, budget and temperature, and the method reconsiders."""
    if len(methods) * len(temperatures) > 1:
        raise UserError("diagnose looks at one method, budget and temperature at a time: name one of each")
    [method] = methods
    if not method.tree.num_reconsider:
        raise UserError(f"{method.typed} reconsiders nothing: diagnose needs pr, with m of at least 1")
    return method
