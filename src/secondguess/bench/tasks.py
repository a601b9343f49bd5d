"""Benchmark prompts: a named task's file or hub data set, or any JSONL of ``{"id", "benchmark", "turns"}``.

A named task is a file ``secondguess/tasks/NAME.toml`` that says where its rows are, how a turn becomes a prompt, where
answers stop, and under which licence.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.bench.hub import hub_rows
from secondguess.errors import UserError, did_you_mean

ALL = "all tasks"  # stands for a task's name in rows over all of them
DATA_VARIABLE = "SECONDGUESS_DATA"
FOLDER = Path(__file__).parent.parent / "tasks"
ORDER = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a task file says. ``prompt`` is the user's message, with ``{turn}`` in it."""

    version: int
    about: str
    source: str
    licence: str
    file: str
    prompt: str
    stop: tuple[str, ...]
    hub: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path) -> Task:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(**fields | {"stop": tuple(fields["stop"])})


TASKS = {name: Task.of(FOLDER / f"{name}.toml") for name in ORDER}


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """A row of a task: what the user says, turn by turn."""

    task: str
    id: str
    turns: tuple[str, ...]
    stop: tuple[str, ...] = ()
    reference: str | None = None  # the right answer, if it is known and a text


def load_tasks(
    names: Sequence[str], data_dir: Path | None = None, limit: int | None = None, seed: int = 0
) -> list[TaskPrompt]:
    """The prompts of all tasks, in order.

    A name of ``TASKS`` is looked up in ``data_dir`` if there is one, else in the folder that SECONDGUESS_DATA names if
    it names one, else on the hub;
    anything else is the path of a JSONL file, whose stem names the task. ``limit`` takes rows with about that many
    turns, each a prompt of its own, evenly spaced over the task (so mt_bench's categories all have their share) from
    row ``seed`` on: the same in every run.

    Raises UserError when a task cannot be found or a file is broken.
    """
    prompts: dict[str, list[TaskPrompt]] = {}
    for name in names:
        task = name if name in TASKS else find_file(name).stem
        if task in prompts:
            raise UserError(f"two tasks are called {task!r}: give each once, under a name of its own")
        rows = read_task(name, task, data_dir)
        prompts[task] = evenly_spaced(rows, num_rows(rows, limit), seed)
    return [prompt for task in prompts.values() for prompt in task]


def folder_of(data_dir: Path | None) -> Path | None:
    """Of the named tasks' files: as given, else what SECONDGUESS_DATA names."""
    from_variable = os.environ.get(DATA_VARIABLE)
    folder = data_dir or (Path(from_variable) if from_variable else None)
    return folder and folder.expanduser()


def found_tasks(data_dir: Path | None) -> list[str]:
    """The named tasks whose files are here."""
    folder = folder_of(data_dir)
    return [name for name, task in TASKS.items() if folder and (folder / task.file).is_file()]


def read_task(name: str, task: str, data_dir: Path | None) -> list[TaskPrompt]:
    """All prompts of a named task or a file."""
    if name not in TASKS:
        return parse(read_jsonl(find_file(name)), task, None)
    folder = folder_of(data_dir)
    known, where = TASKS[name], f"point --data-dir or {DATA_VARIABLE} at a folder with {TASKS[name].file}"
    if folder is None:
        return parse(hub_rows(name, known.hub, where), task, known)
    path = folder / known.file
    if not path.is_file():
        raise UserError(f"task {name!r} not found in {folder}: {where}")
    return parse(read_jsonl(path), task, known)


def find_file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        known = f"the names are {', '.join(TASKS)}{did_you_mean(name, TASKS)}"
        raise UserError(f"no task {name!r}: no such file, and {known}")
    return path


def read_jsonl(path: Path) -> Iterable[tuple[str, Any]]:
    """Rows, each with the name of its place. Raises UserError with file and line at a line that is no JSON."""
    # Bytes: str.splitlines would also split at U+2028, which JSON allows inside strings.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise UserError(f"{path}:{number}: not UTF-8 text") from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: {error}") from error
            yield f"{path}:{number}", row


def parse(rows: Iterable[tuple[str, Any]], task: str, known: Task | None) -> list[TaskPrompt]:
    """Raises UserError, with its place, at the first broken row."""
    prompts: dict[str, TaskPrompt] = {}
    for place, row in rows:
        try:
            prompt = parse_row(row, task, known)
            for text in (prompt.id, *prompt.turns):
                text.encode()  # no half characters
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
        if prompt.id in prompts:
            raise UserError(f"{place}: id {prompt.id!r} was used by an earlier row")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UserError(f"task {task} has no prompts")
    return list(prompts.values())


def parse_row(row: Any, task: str, known: Task | None) -> TaskPrompt:
    """Raises ValueError when ``row`` is not an object with a text "id" and a non-empty list of texts "turns".

    A row of a file is formatted as the named task that its "benchmark" says it comes from, if any.
    """
    if not isinstance(row, dict):
        raise ValueError('a row must be an object like {"id": "1", "turns": ["..."]}')
    if not isinstance(row.get("id"), str):
        raise ValueError('"id" must be text')
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('"turns" must be a list of one or more texts')
    known = known or TASKS.get(str(row.get("benchmark")))
    reference = row.get("reference") if isinstance(row.get("reference"), str) else None
    if known is None or known.prompt == "{turn}":
        return TaskPrompt(task, row["id"], tuple(turns), known.stop if known else (), reference)
    turns = tuple(known.prompt.replace("{turn}", turn.rstrip()) for turn in turns)
    return TaskPrompt(task, row["id"], turns, known.stop, reference)


def num_rows(rows: Sequence[TaskPrompt], limit: int | None) -> int | None:
    """How many rows have about ``limit`` turns: all tasks weigh the same, however many turns their rows have."""
    return limit and max(1, round(limit * len(rows) / sum(len(row.turns) for row in rows)))


def evenly_spaced(prompts: list[TaskPrompt], limit: int | None, seed: int = 0) -> list[TaskPrompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i] for i in sorted((i * len(prompts) // limit + seed) % len(prompts) for i in range(limit))]
