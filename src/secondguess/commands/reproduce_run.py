"""What ``secondguess reproduce`` measures, as ``eval``, ``bench`` and ``diagnose`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from secondguess.bench.acceptance import Tally
from secondguess.bench.diagnosis import results
from secondguess.bench.metrics import group_costs, is_looping
from secondguess.bench.plan import Prompt, make_groups, row_of
from secondguess.bench.report import Findings
from secondguess.bench.runner import Bench, keys
from secondguess.bench.serial import look_in_series
from secondguess.bench.store import Store
from secondguess.commands.bench import measure
from secondguess.commands.bench_run import CONVERSATION_BATCH
from secondguess.commands.conversations import encode_all
from secondguess.commands.diagnose_run import look, write
from secondguess.commands.eval_run import tally
from secondguess.commands.recordings import recordings, replay_all
from secondguess.commands.reproduce_steps import draw_steps
from secondguess.config import TreeConfig
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.methods import Method, make_speculator, open_drafter, parse_method
from secondguess.reproduce.cells import Kind, Measurement
from secondguess.reproduce.plan import Job
from secondguess.reproduce.records import LIVE_COLUMNS, REPLAY_COLUMNS, Record, numbered
from secondguess.reproduce.world import World, digest, figures_folder, method_of

if TYPE_CHECKING:
    from rich.console import Console

Results = dict[Measurement, Record]


def run_job(world: World, job: Job, console: Console) -> Results:
    """A record per measurement. What the user could mend stops no other job: it is why these have no numbers."""
    try:
        return RUNNERS[job.kind](world, job, console)
    except UserError as error:
        why = f"{job.name}: {error}"
        console.print(f"not measured: {why}", markup=False, soft_wrap=True)
        return dict.fromkeys(job.measurements, Record(0.0, 0, complaints=(why,), session=session_of(world, job)))


def replay_job(world: World, job: Job, console: Console) -> Results:
    """Tau: every method over the same texts, decoded once."""
    args = world.with_args(temperatures=(job.temperature,))
    methods = {method_of(m): m for m in job.measurements}
    prompts = world.prompts(job.measurements[0])
    [recording] = recordings(args, world.target, list(methods), prompts, console, world.loaded, world.texts)
    size, columns = args.batch_size, recording.num_columns
    folders = {method: world.folders[m.variant.drafter] for method, m in methods.items()}
    speculators = {
        method: run(make_speculator, method, world.target, folder, size, columns, world.loaded)
        for method, folder in folders.items()
    }
    tallies = {method: recording.tallies() for method in methods}
    started = perf_counter()
    replay_all(world.target, speculators, recording, size, partial(tally, tallies), console)
    seconds = (perf_counter() - started) / len(methods)
    return {m: replayed(tallies[method], seconds) for method, m in methods.items()}


def replayed(tallies: Sequence[Tally], seconds: float) -> Record:
    rows = numbered(t.conversation for t in tallies)
    units = [[row, int(t.looping), t.num_emitted, t.num_cycles] for row, t in zip(rows, tallies, strict=True)]
    return Record(seconds, sum(t.num_emitted for t in tallies), REPLAY_COLUMNS, units)


def live_job(world: World, job: Job, console: Console) -> Results:
    """Time: plain decoding and every method take turns on each group of prompts. That is a session."""
    prompts = world.prompts(job.measurements[0])
    encoded = encode_all(world.target, prompts, world.args.max_new_tokens, CONVERSATION_BATCH, console, world.texts)
    bench = make_bench(world, job, encoded)
    session = session_of(world, job)
    store = Store(world.args.out / "live" / session, ingredients(world, job), world.record["revision"])
    findings = measure(bench, store, console)
    return {m: replace(timed(findings, method_of(m)), session=session) for m in job.measurements}


def ingredients(world: World, job: Job) -> dict[str, Any]:
    """What makes a live job the one that it is: a run that was killed goes on with it, unless the code has changed."""
    measurements = [world.made_of(m) for m in job.measurements]
    return {"job": job.name, "revision": world.record["revision"], "measurements": measurements}


def session_of(world: World, job: Job) -> str:
    """A name for the turns that a live job's methods take. What is not timed has none."""
    return digest(ingredients(world, job))[:16] if job.kind == "live" else ""


def make_bench(world: World, job: Job, prompts: Sequence[Prompt]) -> Bench:
    args, context_len = world.args, world.target.spec.context_len
    longest = max(len(prompt.ids) for prompt in prompts) + args.max_new_tokens
    room = {"max_batch_size": job.batch_size, "max_model_len": min(longest, context_len)}
    room["enable_prefix_caching"] = False  # every method reads its prompts
    llms = {parse_method("ar", TreeConfig()): LLM(world.target, method="ar", **room)}
    llms |= {method_of(m): make_llm(world, m, room) for m in job.measurements}
    groups = make_groups(prompts, job.batch_size)
    return Bench(llms, groups, job.batch_size, (job.temperature,), args.max_new_tokens, args.seed)


def make_llm(world: World, m: Measurement, room: dict[str, Any]) -> LLM:
    method, folder = method_of(m), world.folders[m.variant.drafter]
    drafter = run(open_drafter, method, world.target, folder, world.loaded)
    llm = LLM(world.target, drafter, method=m.variant.method, tree=TreeConfig(budget=m.at.budget), **room)
    if m.variant.serial:
        run(look_in_series, llm.engine)
    return llm


def timed(findings: Findings, method: Method) -> Record:
    """A unit per group; none at all if one of them failed."""
    bench, complaints = findings.bench, tuple(findings.complaints())
    plain, [temperature] = next(iter(bench.llms)), bench.temperatures
    units, seconds = [], 0.0
    rows = numbered(tuple(row_of(prompt.id) for prompt in group.prompts) for group in bench.groups)
    for row, group in zip(rows, bench.groups, strict=True):
        ours, theirs = ([findings.results[key] for key in keys(group, x, temperature)] for x in (method, plain))
        if any(result.error is not None for result in (*ours, *theirs)):
            return Record(0.0, 0, LIVE_COLUMNS, [], complaints=complaints)
        [(tokens, longest)], [(plain_tokens, plain_longest)] = group_costs(ours), group_costs(theirs)
        looping = int(all(is_looping(result.token_ids) for result in theirs))
        plain_part = [plain_tokens, plain_longest.decode_s]
        units.append([row, looping, tokens, longest.decode_s, *plain_part, longest.num_cycles])
        seconds += ours[0].wall_s
    return Record(seconds, sum(unit[2] for unit in units), LIVE_COLUMNS, units, complaints=complaints)


def diagnosis_job(world: World, job: Job, console: Console) -> Results:
    """Figure 1 and Table 7, their figures, and a picture of co-forwarding."""
    [m] = job.measurements
    args = world.with_args(temperatures=(job.temperature,), drafter=str(world.folders[m.variant.drafter]))
    prompts, started = world.prompts(m), perf_counter()
    diagnosis = look(args, world.target, method_of(m), prompts, console, world.texts)
    seconds = perf_counter() - started
    folder = world.args.out / figures_folder(m)
    folder.mkdir(parents=True, exist_ok=True)
    setting = f"PR, B = {m.at.budget}, T = {m.at.temperature:g}, {sum(len(p.turns) for p in prompts)} prompts"
    write(diagnosis, setting, world.record, folder)
    draw_steps(args, world.target, method_of(m), prompts, folder, console, world.texts)
    tokens = sum(b.true.count for b in diagnosis.figure1a)
    return {m: Record(seconds, tokens, found={entry["name"]: entry["value"] for entry in results(diagnosis)})}


RUNNERS: dict[Kind, Callable[[World, Job, Console], Results]] = {
    "replay": replay_job,
    "diagnosis": diagnosis_job,
    "live": live_job,
}
