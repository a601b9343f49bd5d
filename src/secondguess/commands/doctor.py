"""``secondguess doctor``: does this drafter fit this target, what is wrong, and how many of its guesses are right."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from secondguess.commands.options import add_target
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.types import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_target(parser)
    add("drafter", metavar="DRAFTER", help="folder, or name of one that ships for the target")
    probe = "replay the drafter over the target's answers to 20 prompts (default: do)"
    add("--probe", action=argparse.BooleanOptionalAction, default=True, help=probe)
    add("--budget", type=int, default=24, metavar="INT", help="draft tokens per cycle of the probe (default: 24)")
    add("--max-new-tokens", type=int, default=32, metavar="INT", help="of each answer (default: 32)")
    keep = "keep the acceptance length that the probe finds in the checkpoint, for its card and for later doctors"
    add("--record", action="store_true", help=keep)
    add("--dtype", default="float32", help="float32, float64, bfloat16 or float16 (default: float32)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    TreeConfig(budget=args.budget)
    SamplingParams(max_tokens=args.max_new_tokens)
    if args.record and not args.probe:
        raise UserError("--record keeps what the probe finds: leave out --no-probe")

    from rich.console import Console

    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.doctor_run import look
    from secondguess.commands.show_findings import conclusion, table
    from secondguess.drafter.shipped import find_drafter

    target = load(args.target, args.dtype, trust_remote_code=args.trust_remote_code)
    folder = find_drafter(args.drafter, args.drafter, target.embedding)
    findings = look(args, target, folder, Console(stderr=True, highlight=False))
    if args.json:
        write_json(args.json, make_record(), "results", [asdict(f) for f in findings])
    console = stdout_console()
    console.print(table(findings))
    console.print(conclusion(findings), markup=False)
    return int(any(f.verdict == "error" for f in findings))
