"""Which jobs are left to measure all cells, and about what they cost. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from secondguess.reproduce.cells import Cell, Kind, Measurement
from secondguess.reproduce.records import Record

ORDER: tuple[Kind, ...] = ("replay", "diagnosis", "live")
DIAGNOSIS_REPLAYS = 3  # it replays chains and trees, and needs the target's probabilities
# Bytes on disk: of a unit in a record, of a request in a live run and of each of its tokens, of a report with plots.
UNIT_BYTES, REQUEST_BYTES, TOKEN_BYTES, REPORT_BYTES = 40, 900, 7, 2_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """Measurements that share their texts: replay decodes these once, live methods take turns on them."""

    kind: Kind
    tasks: tuple[str, ...]
    temperature: float
    batch_size: int
    measurements: tuple[Measurement, ...]

    @property
    def name(self) -> str:
        what = {"replay": "replay", "diagnosis": "diagnosis", "live": f"live, batches of {self.batch_size}"}[self.kind]
        return f"{what}: {', '.join(self.tasks)}, T = {self.temperature:g}"

    @property
    def methods(self) -> list[str]:
        return [f"{m.variant.name} B = {m.at.budget}" for m in self.measurements]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per token: decoded plainly, replayed by one method, decoded live by one method."""

    plain: float
    replay: float
    live: float
    source: str  # where they come from


def distinct(cells: Iterable[Cell]) -> list[Measurement]:
    """What the cells ask for, each once."""
    return list(dict.fromkeys(m for cell in cells for m in cell.measurements))


def jobs_of(measurements: Iterable[Measurement]) -> list[Job]:
    """In the order in which they run: what needs no clock comes first."""
    groups: dict[tuple, list[Measurement]] = {}
    for m in measurements:
        alone = m.at.budget if m.kind == "diagnosis" else None
        groups.setdefault((m.kind, m.tasks, m.at.temperature, m.at.batch_size, alone), []).append(m)
    firsts = [(group[0], tuple(group)) for group in groups.values()]
    jobs = [Job(m.kind, m.tasks, m.at.temperature, m.at.batch_size, group) for m, group in firsts]
    return sorted(jobs, key=lambda job: ORDER.index(job.kind))


def measured_costs(records: Mapping[Measurement, Record]) -> Costs | None:
    """From what has been measured; None unless that holds both replay and live decoding of single requests."""
    replays = [r for m, r in records.items() if m.kind == "replay"]
    lives = [r for m, r in records.items() if m.kind == "live" and m.at.batch_size == 1 and r.units]
    plain = [sum(sum(r.column(name)) for r in lives) for name in ("plain tokens", "plain seconds")]
    tokens = [plain[0], *(sum(r.tokens for r in part) for part in (replays, lives))]
    seconds = [plain[1], *(sum(r.seconds for r in part) for part in (replays, lives))]
    if not all(tokens):
        return None
    each = [s / n for s, n in zip(seconds, tokens, strict=True)]
    return Costs(each[0], each[1], each[2], "cells measured before")


def job_seconds(job: Job, costs: Costs, tokens: int) -> float:
    """``tokens`` of answers: about, and at most, since texts that are recorded already are not decoded again."""
    per_method = {"replay": costs.replay, "diagnosis": DIAGNOSIS_REPLAYS * costs.replay, "live": costs.live}[job.kind]
    return tokens * (costs.plain + per_method * len(job.measurements))


def job_bytes(job: Job, num_prompts: int, tokens: int) -> int:
    methods = len(job.measurements)
    if job.kind == "live":
        return (methods + 1) * (num_prompts * REQUEST_BYTES + tokens * TOKEN_BYTES)
    return methods * num_prompts * UNIT_BYTES


def words(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
