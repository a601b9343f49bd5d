"""The command line: finds the command, and turns every failure into one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 bad usage or bad input, 130 interrupted. SECONDGUESS_DEBUG=1 adds a traceback.

A command is a module ``secondguess.commands.NAME`` with ``add_arguments(parser)`` and ``run(args) -> int``. It is
imported only when asked for, and imports torch only inside ``run``, so that help and usage errors come at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from keyword import iskeyword
from types import ModuleType
from typing import NoReturn

from secondguess.errors import UserError, did_you_mean

COMMANDS = {
    "demo": "the default target decoded plainly, with EAGLE-3.1 and with PR, side by side",
    "generate": "continue prompts with one or more decoding methods",
    "chat": "a conversation on the terminal, coloured by who guessed what",
    "serve": "an OpenAI-compatible server, and a page for browsers",
    "bench": "acceptance length and speed of methods on tasks, timed live",
    "eval": "acceptance of drafters on tasks by replay, without verification or timing",
    "tables": "what eval wrote as tables in Markdown, with groups of tasks",
    "trace": "record every cycle's draft tree on tasks, by replay",
    "tree": "draw one cycle's draft tree of a trace",
    "quality": "what weights of fewer bits change of a target, beside llama.cpp's",
    "growth": "a cycle's time against budget, batch, context and draft vocabulary",
    "diagnose": "where a PR drafter fails, and what its second look recovers and breaks",
    "reproduce": "the paper's tables and figures on your target, the paper's row beside yours",
    "prepare": "training data: the target's own answers to your prompts",
    "capture": "the target's states at its answers, on disk, ahead of training",
    "train": "train an EAGLE-3.1 or PR drafter from a config file",
    "doctor": "does a drafter fit a target: what is wrong, and how to mend it",
    "import": "read an EAGLE-3 drafter of another trainer",
    "card": "write a drafter's model card: data, licence, acceptance, retraining",
    "export": "write a drafter for other engines",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UserError``: one line, no usage page, no abbreviated flags."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see '{self.prog} --help')")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As ``parse_args``, but an unknown flag is answered with the nearest known one."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            word = next((w for w in unknown if w.startswith("-")), unknown[0])
            flag = word.split("=")[0]
            what = f"unknown flag {flag}" if word.startswith("-") else f"unexpected argument {word!r}"
            self.error(what + did_you_mean(flag, self._option_string_actions))
        return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``--help`` and ``--version`` raise ``SystemExit(0)``."""
    _open_streams()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # so that a reader who has left (``| head``) is found out here and not at exit
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            sys.stdout.write("\n")  # whatever was being written ends here
        return _fail("interrupted", 130)
    except UserError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        return _leave_quietly()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _fail(_reason(error), 2)
        return _fail(f"{_reason(error)} (SECONDGUESS_DEBUG=1 shows where)", 1)
    except Exception as error:  # the boundary: whatever the work raised ends as one line
        return _fail(f"{_reason(error)} (SECONDGUESS_DEBUG=1 shows where)", 1)


def _open_streams() -> None:
    """Streams that the caller has closed (``>&-``) lead nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line}"


def _leave_quietly() -> int:
    """As rich does when nobody reads standard output any more: what is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _run(argv: Sequence[str]) -> int:
    top = _top_parser().parse(argv)
    if top.command is None:
        raise UserError(f"no command given: one of {', '.join(COMMANDS)} (see 'secondguess --help')")
    if top.command not in COMMANDS:
        raise UserError(
            f"unknown command {top.command!r}{did_you_mean(top.command, COMMANDS)} (see 'secondguess --help')"
        )
    parser, command = parser_of(top.command)
    return command.run(parser.parse(top.arguments))


def parser_of(name: str) -> tuple[Parser, ModuleType]:
    """A command's parser and its module."""
    # "import" is a word of Python's: its module is called import_.
    command = import_module(f"secondguess.commands.{name}{'_' * iskeyword(name)}")
    parser = Parser(f"secondguess {name}", COMMANDS[name])
    command.add_arguments(parser)
    return parser, command


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = Parser("secondguess", "Speculative decoding that takes a second look.", f"commands:\n{listing}")
    parser.add_argument("--version", action="version", version=f"secondguess {version('secondguess')}")
    parser.add_argument("command", nargs="?", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see 'secondguess COMMAND --help'")
    return parser


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe changes no exit code
        if os.environ.get("SECONDGUESS_DEBUG") == "1":
            traceback.print_exc()
        sys.stderr.write(f"secondguess: {' '.join(message.split())}\n")
        sys.stderr.flush()
    return code
