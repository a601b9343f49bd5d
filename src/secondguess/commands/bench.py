"""``secondguess bench``: acceptance length and speed of methods on tasks, timed live."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.atomic import check_folder
from secondguess.bench.peers.known import KNOWN
from secondguess.commands.progress import progress
from secondguess.commands.record import add_json, make_record, passport, write_json
from secondguess.commands.stamped import stamped
from secondguess.commands.workload import add_workload, check, comma_separated
from secondguess.errors import require
from secondguess.lock import locked

if TYPE_CHECKING:
    from rich.console import Console

    from secondguess.bench.report import Findings
    from secondguess.bench.result import Result
    from secondguess.bench.runner import Bench
    from secondguess.bench.store import Store

FILES = ("settings.json", "requests.jsonl", "audits.json", "table.md")  # of a run folder
TABLE_WIDTH = 80  # at least: a narrower terminal breaks lines rather than numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, "ar always runs")
    together = "prompts decoded together (default: 1)"
    parser.add_argument("--batch-size", type=int, default=1, metavar="INT", help=together)
    peers = f"other engines in the same run, at T = 0: {', '.join(KNOWN)}, or installed"
    parser.add_argument("--peers", type=comma_separated(str), default=(), metavar="NAME,...", help=peers)
    rounds = "times that everything is run; every other round goes backwards (default: 1)"
    parser.add_argument("--rounds", type=int, default=1, metavar="INT", help=rounds)
    out = "run folder; one that holds an unfinished run with the same settings is continued"
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"{out} (default: runs/bench-TIME)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from secondguess.commands.bench_run import make_bench, open_store
    from secondguess.commands.compare import load

    methods, prompts = check(args)
    record, stderr = make_record(), Console(stderr=True, highlight=False)
    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    bench = make_bench(args, target, methods, prompts, stderr)
    folder = args.out or stamped(Path("runs"), "bench")
    check_folder(folder)
    own = args.json and args.json.absolute().parent == folder.absolute() and args.json.name in FILES
    require(not own, f"--json {args.json} is a file of the run folder itself: name another file")
    with locked(folder), closing(bench):
        store = open_store(args, folder, target, bench, record)
        try:
            findings = measure(bench, store, stderr)
        except KeyboardInterrupt:
            where = f"results so far are in {folder}; go on with the same command and --out {folder}"
            stderr.print(where, markup=False, soft_wrap=True)
            raise
        write(findings, record | {"revision": ", ".join(sorted(store.revisions))}, folder, args.json)
    complaints = findings.complaints()
    for line in [*findings.doubts(), *complaints]:
        stderr.print(line, markup=False, soft_wrap=True)
    return 1 if complaints else 0


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


def peer_versions(results: Iterable[Result]) -> dict[str, str]:
    """What other engines the results were made with; several versions where one was changed on the way."""
    found: dict[str, set[str]] = {}
    for result in results:
        for name, version in result.versions.items():
            found.setdefault(f"{result.key.method}: {name}", set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def write(findings: Findings, record: dict[str, Any], folder: Path, json_file: Path | None) -> None:
    """Tables to standard output; rows, tables and audits to the run folder."""
    from secondguess.bench.report import markdown, rich_tables
    from secondguess.commands.compare import stdout_console

    record = record | {"versions": record["versions"] | peer_versions(findings.results.values())}
    rows = findings.rows()
    totals = findings.totals() if len({row["task"] for row in rows}) > 1 else []
    shown = rows + totals
    for path in filter(None, (folder / "summary.json", json_file)):
        write_json(path, record, "rows", rows, totals=totals)
    audits = [key._asdict() | asdict(audit) for key, audit in findings.audits.items()]
    write_json(folder / "audits.json", record, "results", audits)
    remarks = "".join(f"- {line}\n" for line in findings.doubts())
    (folder / "table.md").write_text(f"{passport(record)}\n\n{markdown(shown)}\n{remarks}", encoding="utf-8")
    console = stdout_console()
    console.width = max(console.width, TABLE_WIDTH)
    for table in rich_tables(shown):
        console.print(table, "")
    console.print(f"run folder: {folder}", markup=False, soft_wrap=True)
