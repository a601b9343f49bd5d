"""What an eval counted, text by text: its rows over tasks and groups of tasks, and its form in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.bench.acceptance import Tally, measure
from secondguess.bench.tasks import ALL
from secondguess.errors import UserError

Row = dict[str, Any]
Groups = Mapping[str, Sequence[str]]  # names of tasks by the name of their group


@dataclass(frozen=True, slots=True)
class Run:
    """What a method did with each text. ``shape``: of its trees, as ``bench.plan`` tells it."""

    method: str  # as typed
    shape: Mapping[str, int | str]
    tallies: Sequence[Tally]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All methods over the texts at one temperature. ``tasks``: of each text."""

    temperature: float
    tasks: Sequence[str]
    runs: Sequence[Run]

    def parts(self, groups: Groups) -> dict[str, list[int]]:
        """The texts of each task, of each group, and of all tasks if there are several."""
        made: Groups = {task: [task] for task in dict.fromkeys(self.tasks)}
        whole = {ALL: list(made)} if len(made) > 1 else {}
        return {
            name: [i for i, task in enumerate(self.tasks) if task in tasks]
            for name, tasks in {**made, **groups, **whole}.items()
        }

    def rows(self, against: str, groups: Groups) -> list[Row]:
        """One row per task, group and method, in this order. Gains are over ``against`` with the same budget."""
        parts = self.parts(groups)
        return [self.row(run, against, name, part) for name, part in parts.items() for run in self.runs]

    def row(self, run: Run, against: str, name: str, part: Sequence[int]) -> Row:
        budget = run.shape["budget"]
        other = next((r for r in self.runs if r.method == against and r.shape["budget"] == budget), run)
        ours, theirs = ([of.tallies[i] for i in part] for of in (run, other))
        measured = measure(ours, None if other is run else theirs)
        return {"method": run.method, "task": name, "temperature": self.temperature, **run.shape, **measured}

    def to_json(self) -> dict[str, Any]:
        """As ``from_json`` reads it; ``counts`` are those of each text."""
        texts = self.runs[0].tallies
        return {
            "temperature": self.temperature,
            "tasks": list(self.tasks),
            "conversations": [t.conversation for t in texts],
            "looping": [t.looping for t in texts],
            "runs": [{"method": r.method, **r.shape, "counts": [t.counts() for t in r.tallies]} for r in self.runs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        runs = []
        for run in data["runs"]:
            shape = {name: value for name, value in run.items() if name not in ("method", "counts")}
            texts = zip(data["looping"], data["conversations"], run["counts"], strict=True)
            runs.append(Run(run["method"], shape, [Tally.of(*text) for text in texts]))
        return cls(data["temperature"], data["tasks"], runs)


def read(path: Path) -> tuple[list[Evaluation], str]:
    """What ``secondguess eval --json`` wrote, and the method that its gains are over.

    Raises UserError if the file is none of these.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [Evaluation.from_json(data) for data in content["evaluations"]], content["against"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is nothing that 'secondguess eval --json' wrote, or too old: {error!r}") from error
