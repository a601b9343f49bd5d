"""``secondguess prepare``: training data, the target's own answers to prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from secondguess.atomic import check_folder
from secondguess.bench.tasks import DATA_VARIABLE, TASKS, found_tasks, load_tasks
from secondguess.commands.options import DTYPES, add_device, add_target, add_variables
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.commands.workload import comma_separated
from secondguess.errors import UserError, install, require
from secondguess.prepare.overlap import Index
from secondguess.prepare.selection import Selection
from secondguess.types import SamplingParams

SHOWN = 1  # rows after a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Prompts are all that is taken from conversations: what an assistant says in them is never used, every answer\n"
        "is the target's own. Answers that --out holds are kept, so an interrupted run goes on when it is given again."
    )
    add = parser.add_argument
    add_target(parser)
    formats = ".jsonl with turns, messages or conversations in each line, or .txt with a prompt a line"
    add("prompts", metavar="FILE", nargs="*", type=Path, help=formats)
    add("--out", type=Path, required=True, metavar="FILE", help="answers, for train; answers that it holds are kept")
    add("--show", type=int, metavar="INT", help=f"rows of --out to show, also without FILE (default: {SHOWN})")
    add_prompts(parser)
    add_answers(parser)
    add_json(parser)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    add, words = parser.add_argument, comma_separated(str)
    made = "also answer INT prompts that the target writes itself (temperature 1, top-p 0.95), in OUT.prompts.jsonl"
    add("--synthesize", type=int, metavar="INT", help=made)
    add("--limit", type=int, metavar="INT", help="conversations, evenly spaced over the files (default: all)")
    add("--system", help="system prompt of conversations that have none (default: the chat template's own)")
    refuse = f"tasks whose text no prompt may share 13 words with: {', '.join(TASKS)}, or JSONL files (default: all"
    add("--refuse-overlap", type=words, metavar="TASK,...", help=f"{refuse} of these whose files are there)")
    add("--leave-out-overlap", action="store_true", help="go on without such prompts instead of stopping at one")
    add("--allow-overlap", action="store_true", help="compare prompts with no task")
    add("--data-dir", type=Path, help=f"folder of the named tasks' files (default: what {DATA_VARIABLE} names)")


def add_answers(parser: argparse.ArgumentParser) -> None:
    add, floats = parser.add_argument, comma_separated(float)
    mix = "a conversation has one of these, drawn by its id (default: 0,1)"
    add("--temperature", dest="temperatures", type=floats, default=(0.0, 1.0), metavar="FLOAT,...", help=mix)
    add_variables(parser)
    add("--top-k", type=int, default=0, metavar="INT", help="where the temperature is not 0; 0 keeps all (default: 0)")
    add("--max-new-tokens", type=int, default=256, metavar="INT", help="of one answer (default: 256)")
    add("--seed", type=int, default=0, metavar="INT", help="of all draws (default: 0)")
    together = "answers decoded together, or asked for at once of an endpoint (default: 32)"
    add("--batch-size", type=int, default=32, metavar="INT", help=together)
    add("--dtype", help=DTYPES)
    add_device(parser)
    server = "OpenAI-compatible server that runs the target, like http://localhost:8000/v1; OPENAI_API_KEY is its key"
    add("--endpoint", metavar="URL", help=server)
    add("--model", metavar="NAME", help="the target's name there (default: TARGET)")
    given = "answers to take as they are, as --compact wrote them; may be repeated"
    add("--given", type=Path, action="append", default=[], metavar="FILE", help=given)
    add("--only-given", action="store_true", help="take those, and have no others written")
    add("--compact", type=Path, metavar="FILE", help="also write all answers without their prompts (safetensors)")


def run(args: argparse.Namespace) -> int:
    check(args)
    if not (args.prompts or args.synthesize):
        return show(args)
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    tasks = benchmarks(args)
    if not (tasks or args.allow_overlap):
        how = f"point --data-dir or {DATA_VARIABLE} at the tasks' files"
        console.print(f"prompts are compared with no benchmark: {how}", markup=False, soft_wrap=True)
    index = Index(turn for prompt in load_tasks(tasks, args.data_dir) for turn in prompt.turns)
    selection = Selection(args.limit, args.system, index, args.leave_out_overlap, args.batch_size)
    conversations = selection.read(args.prompts) if args.prompts else []

    from secondguess.commands.compare import stdout_console
    from secondguess.commands.prepare_run import prepare
    from secondguess.commands.show_answers import show_rows

    record = make_record()
    chat, result = prepare(args, selection, conversations, console)
    show_rows(chat, args.out, SHOWN if args.show is None else args.show, stdout_console())
    if args.json:
        write_json(args.json, record, "results", [result])
    return 0


def benchmarks(args: argparse.Namespace) -> Sequence[str]:
    """The tasks whose text prompts are compared with: as typed, else those that are here."""
    if args.allow_overlap:
        return ()
    return found_tasks(args.data_dir) if args.refuse_overlap is None else args.refuse_overlap


def show(args: argparse.Namespace) -> int:
    """Rows of a file that is there."""
    if not args.show:
        raise UserError("no prompts: give files, --synthesize INT, or --show INT to look at answers that are there")

    from secondguess.commands.compare import stdout_console
    from secondguess.commands.show_answers import show_rows
    from secondguess.prepare.chat import load_chat

    show_rows(load_chat(args.target, args.trust_remote_code), args.out, args.show, stdout_console())
    return 0


def check(args: argparse.Namespace) -> None:
    """Every mistake in the flags."""
    for temperature in args.temperatures:
        SamplingParams(temperature=temperature, top_k=args.top_k, seed=args.seed, max_tokens=args.max_new_tokens)
    for name, least in (("batch_size", 1), ("limit", 1), ("synthesize", 1), ("show", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    check_folder(args.out.parent)
    require(args.given or not args.only_given, "--only-given needs --given")
    refused = args.refuse_overlap or args.leave_out_overlap
    require(not (args.allow_overlap and refused), "--allow-overlap compares nothing: leave out the other overlap flags")
    if args.endpoint:
        check_endpoint(args)
    elif args.model:
        raise UserError("--model is the target's name at an --endpoint: give one, or leave it out")


def check_endpoint(args: argparse.Namespace) -> None:
    try:
        parts = urlsplit(args.endpoint)
    except ValueError as error:
        raise UserError(f"--endpoint {args.endpoint} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--endpoint must be a URL like http://localhost:8000/v1, got {args.endpoint}")
    if args.dtype:
        raise UserError("--dtype is for a target that is loaded here: leave it out, the --endpoint has its own")
    if find_spec("httpx2") is None:
        raise UserError(f"--endpoint needs httpx2: {install('endpoint')}")
