"""The three things that ``secondguess reproduce`` does: show a plan, measure and report, measure again and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.commands.record import write_json
from secondguess.commands.reproduce_report import write_report
from secondguess.commands.reproduce_run import live_job, replay_job, run_job
from secondguess.commands.show_reproduce import print_check, print_plan, print_report
from secondguess.commands.stamped import stamped
from secondguess.errors import UserError
from secondguess.reproduce.cells import At, Cell
from secondguess.reproduce.check import agrees, sample
from secondguess.reproduce.costs import costs_chapter
from secondguess.reproduce.explanations import Beginning, explained, read_explanations
from secondguess.reproduce.layout import Chapter
from secondguess.reproduce.outcome import Outcome, outcomes
from secondguess.reproduce.plan import (
    REPORT_BYTES,
    Costs,
    Job,
    distinct,
    job_bytes,
    job_seconds,
    jobs_of,
    measured_costs,
    words,
)
from secondguess.reproduce.records import Records
from secondguess.reproduce.tables import cells_of
from secondguess.reproduce.world import World

if TYPE_CHECKING:
    from rich.console import Console

PROBE_PROMPTS, PROBE_TOKENS = 4, 64  # enough for drafting, not reading, to take most of the time


def show_plan(world: World, console: Console) -> int:
    """Print cells, jobs, time and disk."""
    cells, records = cells_of(world.args.what, world.scope), Records(world, world.args.out / "records")
    jobs = jobs_left(cells, records)
    costs = costs_of(world, cells, jobs, records, console)
    rows = [job_row(world, job, costs) for job in jobs]
    print_plan(outcomes_of(cells, records), rows, costs.source if costs else "", REPORT_BYTES)
    if world.args.json:
        write_json(world.args.json, world.record, "rows", rows)
    return 0


def reproduce(world: World, console: Console) -> int:
    """Measure what is left and write the report; 1 if a live text was not plain decoding's, or something failed."""
    folder = world.args.out
    cells, records = cells_of(world.args.what, world.scope), Records(world, folder / "records")
    extras = read_extras(world)
    try:
        run_all(world, cells, records, console)
    except KeyboardInterrupt:
        again = f"what was measured so far is in {folder}; go on with the same command"
        console.print(again, markup=False, soft_wrap=True)
        raise
    made = records.of(cells)
    became = explained(outcomes(cells, made), extras.explanations)
    complaints = list(dict.fromkeys(line for record in made.values() for line in record.complaints))
    folder.mkdir(parents=True, exist_ok=True)
    revisions = sorted({world.record["revision"], *(record.revision for record in made.values())})
    world = replace(world, record={**world.record, "revision": ", ".join(revisions)})
    report = write_report(world, became, complaints, extras.costs)
    if world.args.json:
        write_json(world.args.json, world.record, "rows", [row for o in became for row in o.rows()])
    print_report(report, folder)
    return 1 if complaints else 0


def check_again(world: World, console: Console) -> int:
    """Measure a tenth of the measured cells once more, in a folder of their own, plain texts too; 1 if one does not
    agree.
    """
    cells, records = cells_of(world.args.what, world.scope), Records(world, world.args.out / "records")
    chosen = sample(outcomes_of(cells, records), world.args.check_seed)
    folder = stamped(world.args.out, "check")
    anew = replace(world, args=world.with_args(out=folder), texts=folder / "texts")
    again = Records(anew, folder / "records")
    cells = [o.cell for o in chosen]
    run_all(anew, cells, again, console)
    rows = [compared(first, second) for first, second in zip(chosen, outcomes_of(cells, again), strict=True)]
    write_json(folder / "check.json", world.record, "rows", rows)
    print_check(rows, folder)
    return 0 if all(row["agrees"] for row in rows) else 1


@dataclass(frozen=True, slots=True)
class Extras:
    """What files that the user gives add to the report."""

    explanations: Mapping[Beginning, str]
    costs: Chapter


def read_extras(world: World) -> Extras:
    """Before the work: raises UserError where a file is not what it should be."""
    explain, costs = world.args.explain, world.args.costs
    places = [c.place for s in (world.scope, world.scope.as_in_the_paper()) for c in cells_of("all", s)]
    return Extras(read_explanations(explain, places) if explain else {}, costs_chapter(costs))


def compared(first: Outcome, second: Outcome) -> dict[str, Any]:
    assert first.value is not None
    where, old, new = first.cell.place._asdict(), first.value, second.value
    return where | {
        "first": old.value,
        "low": old.low,
        "high": old.high,
        "second": new and new.value,
        "agrees": agrees(old, new),
    }


def outcomes_of(cells: Sequence[Cell], records: Records) -> list[Outcome]:
    return outcomes(cells, records.of(cells))


def jobs_left(cells: Sequence[Cell], records: Records) -> list[Job]:
    made = records.of(cells)
    return jobs_of(m for m in distinct(cells) if m not in made)


def run_all(world: World, cells: Sequence[Cell], records: Records, console: Console) -> None:
    """Every job that is left, each with about how long it and all that follow take."""
    jobs = jobs_left(cells, records)
    costs = costs_of(world, cells, jobs, records, console)
    for number, job in enumerate(jobs):
        seconds = [float(job_row(world, j, costs)["seconds"] or 0) for j in jobs[number:]]
        time = f": about {words(seconds[0])}, {words(sum(seconds))} left in all" if costs else ""
        methods = f"{len(job.measurements)} method{'s' * (len(job.measurements) > 1)}"
        console.print(f"[{number + 1}/{len(jobs)}] {job.name}, {methods}{time}", markup=False, soft_wrap=True)
        records.add(run_job(world, job, console))
        costs = known_costs(cells, records) or costs


def known_costs(cells: Sequence[Cell], records: Records) -> Costs | None:
    return measured_costs(records.of(cells))


def costs_of(
    world: World, cells: Sequence[Cell], jobs: Sequence[Job], records: Records, console: Console
) -> Costs | None:
    """From what has been measured, else from a probe. None if nothing is left, or the probe's answer ends at once."""
    return known_costs(cells, records) or (probe(world, jobs[0], console) if jobs else None)


def probe(world: World, job: Job, console: Console) -> Costs | None:
    """Replay a few prompts of the job's first task, and decode one, with its first method. What the user could mend is
    told where it matters: at the job.
    """
    first = job.measurements[0]
    tokens = min(PROBE_TOKENS, world.args.max_new_tokens)
    one = replace(first, kind="replay", tasks=first.tasks[:1], at=At(first.at.budget, first.at.temperature))
    pair = (one, replace(one, kind="live"))
    with tempfile.TemporaryDirectory() as folder:
        limit = min(PROBE_PROMPTS, world.args.limit)
        changes = {"limit": limit, "live_limit": 1, "max_new_tokens": tokens, "out": Path(folder)}
        small = replace(world, args=world.with_args(**changes))
        console.print("timing a few prompts", markup=False)
        try:
            timed = [
                measure(small, j, console) for measure, j in zip((replay_job, live_job), jobs_of(pair), strict=True)
            ]
        except UserError:
            return None
    costs = measured_costs(timed[0] | timed[1])
    return costs and replace(costs, source="a few timed prompts")


def job_row(world: World, job: Job, costs: Costs | None) -> dict[str, Any]:
    """A job as the plan tells it; seconds are None where nothing is known."""
    num_prompts = sum(len(p.turns) for p in world.prompts(job.measurements[0]))
    tokens = num_prompts * world.args.max_new_tokens
    return {
        "kind": job.kind,
        "tasks": job.tasks,
        "temperature": job.temperature,
        "batch_size": job.batch_size,
        "methods": job.methods,
        "num_prompts": num_prompts,
        "seconds": costs and job_seconds(job, costs, tokens),
        "bytes": job_bytes(job, num_prompts, tokens),
    }
