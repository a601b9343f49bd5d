"""``secondguess bench``: acceptance length and speed of methods on tasks, timed live."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from secondguess.bench.tasks import DATA_VARIABLE, FILES, TaskPrompt, load_tasks
from secondguess.commands.options import add_dataclass, from_args
from secondguess.commands.progress import progress
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.methods import METHODS, Method, split_methods
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from secondguess.bench.report import Findings
    from secondguess.bench.result import Result
    from secondguess.bench.runner import Bench
    from secondguess.bench.store import Store

T = TypeVar("T")

TASKS = ("gsm8k", "mt_bench", "humaneval")
TABLE_WIDTH = 80  # at least: a narrower terminal breaks lines rather than numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, words, ints, floats = parser.add_argument, comma_separated(str), comma_separated(int), comma_separated(float)
    add("target", metavar="TARGET", help="folder, hub id, .gguf file, or smollm2-135m")
    methods = f"comma-separated: {', '.join(METHODS)}, with settings if wanted (pr:m=0); ar always runs"
    add("--method", default="ar,eagle3.1,pr", help=f"{methods} (default: ar,eagle3.1,pr)")
    tasks = f"comma-separated: {', '.join(FILES)}, or paths of JSONL files"
    add("--tasks", type=words, default=TASKS, help=f"{tasks} (default: {','.join(TASKS)})")
    add("--data-dir", type=Path, help=f"folder of the named tasks' files (default: what {DATA_VARIABLE} names)")
    add("--limit", type=int, metavar="INT", help="prompts per task, evenly spaced over its file (default: all)")
    add("--max-new-tokens", type=int, default=128, metavar="INT", help="new tokens at most (default: 128)")
    budget, baseline = "draft tokens verified per cycle (default: 48)", "each with its own baseline (default: 0)"
    add("--budget", dest="budgets", type=ints, default=(48,), metavar="INT,...", help=budget)
    add("--temperature", dest="temperatures", type=floats, default=(0.0,), metavar="FLOAT,...", help=baseline)
    add("--batch-size", type=int, default=1, metavar="INT", help="prompts decoded together (default: 1)")
    add("--seed", type=int, default=0, metavar="INT", help="of all draws; each prompt has its own from it (default: 0)")
    add("--drafter", help="folder, or name of one that ships (default: the one named like the method)")
    add("--dtype", default="float32", help="float32, float64, bfloat16 or float16 (default: float32)")
    add_dataclass(parser, TreeConfig, ("grow_width", "offer_width", "num_steps", "num_reconsider"))
    out = "run folder; one that holds an unfinished run with the same settings is continued"
    add("--out", type=Path, metavar="DIR", help=f"{out} (default: runs/bench-TIME)")
    add_json(parser)


def comma_separated(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    parse.__name__ = f"comma-separated {kind.__name__}"  # argparse says "invalid NAME value"
    return parse


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from secondguess.commands.bench_run import make_bench, open_store
    from secondguess.commands.compare import load

    methods, prompts = check(args)
    bench = make_bench(args, load(args.target, args.dtype), methods, prompts)
    record, stderr = make_record(), Console(stderr=True, highlight=False)
    store = open_store(args, bench, record)
    try:
        findings = measure(bench, store, stderr)
    except KeyboardInterrupt:
        stderr.print(f"results so far are in {store.folder}; go on with the same command and --out {store.folder}")
        raise
    write(findings, record, store.folder, args.json)
    complaints = findings.complaints()
    for line in complaints:
        stderr.print(line, markup=False)
    return 1 if complaints else 0


def check(args: argparse.Namespace) -> tuple[list[Method], list[TaskPrompt]]:
    """Find every mistake that can be found before the target is loaded."""
    from secondguess.bench.plan import line_up

    for name in ("batch_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for temperature in args.temperatures:
        SamplingParams(temperature=temperature, seed=args.seed, max_tokens=args.max_new_tokens)
    trees = [from_args(TreeConfig, args, budget=budget) for budget in args.budgets]
    return line_up(split_methods(args.method), trees), load_tasks(args.tasks, args.data_dir, args.limit)


def measure(bench: Bench, store: Store, console: Console) -> Findings:
    """Run what is missing under a progress bar that counts decode tokens, then look into texts that differ."""
    from secondguess.bench.report import Findings
    from secondguess.bench.runner import audit_all, run

    longest = bench.max_new_tokens - 1  # prefill emits the first
    total = bench.num_results * longest
    with progress(console) as bar:
        task = bar.add_task("decode tokens", total=total)

        def count(result: Result) -> None:
            nonlocal total
            total -= longest - result.stats.num_tokens  # answers that end early leave less to do
            bar.update(task, advance=result.stats.num_tokens, total=total)

        run(bench, store, count)
    with console.status("checking texts against plain decoding"):
        return Findings(bench, store.results, audit_all(bench, store.results))


def write(findings: Findings, record: dict[str, Any], folder: Path, json_file: Path | None) -> None:
    """Tables to standard output; rows, tables and audits to the run folder."""
    from secondguess.bench.report import markdown, rich_tables
    from secondguess.commands.compare import stdout_console

    rows = findings.rows()
    shown = rows + findings.totals() if len({row["task"] for row in rows}) > 1 else rows
    for path in filter(None, (folder / "summary.json", json_file)):
        write_json(path, record, "rows", rows)
    audits = [key._asdict() | asdict(audit) for key, audit in findings.audits.items()]
    write_json(folder / "audits.json", record, "results", audits)
    passport = f"`{record['command']}`, revision {record['revision']}, {record['machine']['cpu']}, {record['time']}"
    (folder / "table.md").write_text(f"{passport}\n\n{markdown(shown)}", encoding="utf-8")
    console = stdout_console()
    console.width = max(console.width, TABLE_WIDTH)
    for table in rich_tables(shown):
        console.print(table, "")
    console.print(f"run folder: {folder}", markup=False)
