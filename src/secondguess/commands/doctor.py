"""``secondguess doctor``: does this drafter fit this target, what is wrong, and how many of its guesses are right."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from secondguess.commands.options import add_dataclass, add_device, add_target, add_variables, from_args
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.config import TreeConfig, option
from secondguess.errors import UserError
from secondguess.types import SamplingParams

FLAGS = ("probe", "budget", "max_new_tokens", "record")


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """``variables``: what the chat template is given where the drafter will serve."""

    probe: bool = option(True, "replay the drafter over the target's answers to 20 prompts")
    budget: int = option(24, "draft tokens per cycle of the probe")
    max_new_tokens: int = option(32, "of each answer")
    record: bool = option(False, "keep what the probe finds in the checkpoint, for its card and for later doctors")
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TreeConfig(budget=self.budget)
        SamplingParams(max_tokens=self.max_new_tokens)
        if self.record and not self.probe:
            raise UserError("--record keeps what the probe finds: leave out --no-probe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_target(parser)
    add("drafter", metavar="DRAFTER", help="folder, hub id, or name of one that ships for the target")
    add_dataclass(parser, DoctorOptions, FLAGS)
    add_variables(parser)
    add("--dtype", default="float32", help="float32, float64, bfloat16 or float16 (default: float32)")
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = from_args(DoctorOptions, args, variables=dict(args.template_variables))

    from rich.console import Console

    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.doctor_run import look
    from secondguess.commands.show_findings import conclusion, table
    from secondguess.drafter.shipped import find_drafter

    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    folder = find_drafter(args.drafter, args.drafter, target.embedding)
    findings = look(options, target, folder, Console(stderr=True, highlight=False))
    if args.json:
        write_json(args.json, make_record(), "results", [asdict(f) for f in findings])
    console = stdout_console()
    console.print(table(findings))
    console.print(conclusion(findings), markup=False)
    return int(any(f.verdict == "error" for f in findings))
