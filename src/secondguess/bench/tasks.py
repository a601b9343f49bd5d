"""Benchmark prompts: JSONL rows ``{"id", "benchmark", "turns", "reference"}``, by name or by path."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.errors import UserError, did_you_mean

DATA_VARIABLE = "SECONDGUESS_DATA"
FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "math500": "math500.jsonl",
    "aime25": "aime25.jsonl",
    "humaneval": "humaneval.jsonl",
    "mbpp": "mbpp_test.jsonl",
    "livecodebench": "livecodebench_v5.jsonl",
    "mt_bench": "mt_bench.jsonl",
}
# By the row's "benchmark". HumanEval's turn is bare code, which a chat model would not know what to do with.
WRAPPERS = {
    "humaneval": "Write the body of the Python function below, so that it does what its docstring says. "
    "Answer with the whole function.\n\n```python\n{}\n```"
}


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One prompt of a task, as the user's message of a chat."""

    task: str
    id: str
    text: str


def load_tasks(names: Sequence[str], data_dir: Path | None = None, limit: int | None = None) -> list[TaskPrompt]:
    """The prompts of all tasks, in order. Of a conversation (mt_bench) only the first turn is used.

    A name of ``FILES`` is looked up in ``data_dir``, else in the folder that SECONDGUESS_DATA names; anything else is
    the path of a JSONL file, whose stem names the task. ``limit`` takes that many rows of each task, evenly spaced over
    the file (so mt_bench's categories all have their share), the same ones in every run.

    Raises UserError when a task cannot be found or a file is broken.
    """
    prompts: dict[str, list[TaskPrompt]] = {}
    for name in names:
        path = find_task(name, data_dir)
        task = name if name in FILES else path.stem
        if task in prompts:
            raise UserError(f"two tasks are called {task!r}: give each once, under a name of its own")
        prompts[task] = evenly_spaced(read_task(path, task), limit)
    return [prompt for task in prompts.values() for prompt in task]


def find_task(name: str, data_dir: Path | None) -> Path:
    """The file of a task. Raises UserError when there is none."""
    if name not in FILES:
        path = Path(name).expanduser()
        if not path.is_file():
            known = f"the names are {', '.join(FILES)}{did_you_mean(name, FILES)}"
            raise UserError(f"no task {name!r}: no such file, and {known}")
        return path
    from_variable = os.environ.get(DATA_VARIABLE)
    folder = data_dir or (Path(from_variable) if from_variable else None)
    where = f"point --data-dir or {DATA_VARIABLE} at a folder with {FILES[name]}, or give the path of a JSONL file"
    if folder is None:
        raise UserError(f"task {name!r} not found: {where}")
    path = folder.expanduser() / FILES[name]
    if not path.is_file():
        raise UserError(f"task {name!r} not found in {folder}: {where}")
    return path


def read_task(path: Path, task: str) -> list[TaskPrompt]:
    """All prompts of a file. Raises UserError with file and line at the first broken row."""
    prompts: dict[str, TaskPrompt] = {}
    # Bytes: str.splitlines would also split at U+2028, which JSON allows inside strings.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = parse_row(json.loads(line), task)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if prompt.id in prompts:
            raise UserError(f"{path}:{number}: id {prompt.id!r} was used by an earlier row")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UserError(f"{path} has no prompts")
    return list(prompts.values())


def parse_row(row: Any, task: str) -> TaskPrompt:
    """Raises ValueError when ``row`` is not an object with a text "id" and a non-empty list of texts "turns"."""
    if not isinstance(row, dict):
        raise ValueError('a row must be an object like {"id": "1", "turns": ["..."]}')
    if not isinstance(row.get("id"), str):
        raise ValueError('"id" must be text')
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('"turns" must be a list of one or more texts')
    wrapper = WRAPPERS.get(str(row.get("benchmark")))
    return TaskPrompt(task, row["id"], wrapper.format(turns[0].rstrip()) if wrapper else turns[0])


def evenly_spaced(prompts: list[TaskPrompt], limit: int | None) -> list[TaskPrompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]
