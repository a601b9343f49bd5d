"""``secondguess reproduce``: the paper's tables and figures on one's own target, the paper's row beside ours."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from secondguess.atomic import check_folder
from secondguess.bench.paper import PAPER
from secondguess.bench.tasks import ORDER
from secondguess.commands.options import add_target
from secondguess.commands.record import add_json, make_record
from secondguess.commands.workload import add_replay_batch, add_texts, check_numbers, comma_separated
from secondguess.config import TreeConfig
from secondguess.errors import UserError, did_you_mean, install
from secondguess.reproduce.arms import ARMS, parse_arms

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, ints, floats = parser.add_argument, comma_separated(int), comma_separated(float)
    names, instead = (*PAPER, ALL), "in place of the paper's"
    add("what", metavar="WHAT", choices=names, help=", ".join(names))
    add_target(parser)
    add("--plan", action="store_true", help="say what would be measured, in about what time, which a few prompts tell")
    again = "measure a tenth of the cells again, plain texts too: are they in their intervals?"
    add("--check", action="store_true", help=again)
    add("--check-seed", type=int, default=0, metavar="INT", help="picks the tenth (default: 0)")
    out = "report and records; what they hold is not measured again (default: runs/reproduce-TARGET)"
    add("--out", type=Path, metavar="DIR", help=out)
    arm = f"drafter that does not ship, may be repeated: {', '.join(ARMS)}"
    add("--arm", dest="arms", action="append", default=[], metavar="NAME=FOLDER", help=arm)
    tasks = f"comma-separated, some of {', '.join(ORDER)} (default: those that are found)"
    add("--tasks", type=comma_separated(str), default=ORDER, metavar="NAME,...", help=tasks)
    add("--limit", type=int, default=60, metavar="INT", help="prompts per task for tau, evenly spaced (default: 60)")
    live = "prompts per task for time, at most --limit (default: 8)"
    add("--live-limit", type=int, default=8, metavar="INT", help=live)
    add("--budget", dest="budgets", type=ints, metavar="INT,...", help=f"draft tokens verified per cycle, {instead}")
    add("--temperature", dest="temperatures", type=floats, metavar="FLOAT,...", help=f"temperatures, {instead}")
    explain = "why numbers differ from the paper's, for the report: a line TABLE | ROW | COLUMN | QUANTITY: WORDS each"
    add("--explain", type=Path, metavar="FILE", help=explain)
    add("--costs", type=Path, metavar="FILE", help="result.json of scripts/gpu_check.sh, for the report")
    add_texts(parser)
    add_replay_batch(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    arms = check(args)

    from rich.console import Console

    from secondguess.commands.compare import load
    from secondguess.commands.reproduce_work import check_again, reproduce, show_plan
    from secondguess.reproduce.world import make_world

    world = make_world(args, make_record(), load(args.target, args.dtype, args.device, args.trust_remote_code), arms)
    console = Console(stderr=True, highlight=False)
    if args.plan:
        return show_plan(world, console)
    return check_again(world, console) if args.check else reproduce(world, console)


def check(args: argparse.Namespace) -> dict[str, Path]:
    """Find every mistake that can be found before the target is loaded; the drafters that are given."""
    check_numbers(args)
    for budget in args.budgets or ():
        TreeConfig(budget=budget)
    if args.max_new_tokens < 2:
        raise UserError("--max-new-tokens must be at least 2: prefill emits the first token")
    for name in args.tasks:
        if name not in ORDER:
            raise UserError(f"--tasks: the paper has no {name!r}{did_you_mean(name, ORDER)}; it has {', '.join(ORDER)}")
    if args.plan and args.check:
        raise UserError("--plan and --check exclude each other")
    args.live_limit = min(args.live_limit, args.limit)
    args.out = args.out or Path("runs") / f"reproduce-{Path(args.target).name.removesuffix('.gguf')}"
    check_folder(args.out)
    if not args.plan and find_spec("matplotlib") is None:
        raise UserError(f"the plots need matplotlib: {install('plots')}")
    return parse_arms(args.arms)
