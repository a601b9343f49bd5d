"""Answers that took long, kept line by line: a script that was cut short goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from secondguess.atomic import whole_lines
from secondguess.bench.signed import sha256, signed, unsigned


class TimeIsUp(Exception):
    """What is kept is on disk; the same command goes on."""


class Kept:
    """Answers in a file, each under all that it was made of. So an answer to another question is never taken for one.

    Once ``minutes`` have passed since this was made, nothing new is begun (TimeIsUp).
    """

    def __init__(self, path: Path, minutes: float, revision: str) -> None:
        """``revision`` of the code that makes them; ``revisions``: of all that were asked for."""
        self.path, self.revision, self.ends = path, revision, monotonic() + 60 * minutes
        lines = [unsigned(line) for line in whole_lines(path)] if path.exists() else []
        self.lines: dict[str, dict[str, Any]] = {line["key"]: line for line in lines}
        self.revisions = set[str]()

    def __call__(self, made_of: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """The answer to ``made_of`` that was kept, or else what ``make`` returns: a JSON value, now on disk."""
        key = sha256(made_of)
        if key not in self.lines:
            self.add(key, make)
        self.revisions.add(self.lines[key]["revision"])
        return self.lines[key]["answer"]

    def add(self, key: str, make: Callable[[], Any]) -> None:
        if monotonic() > self.ends:
            raise TimeIsUp(f"time is up, {len(self.lines)} answers are in {self.path}: run the same command again")
        line = {"key": key, "answer": make(), "revision": self.revision}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(signed(line))
        self.lines[key] = line
