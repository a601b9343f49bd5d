"""JSONL files that are only ever added to: by one process at a time, and again after a kill."""

from __future__ import annotations

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from secondguess.errors import UserError

BEGIN = b'{"id": '  # of every row that is added


class LineFile(ABC):
    """Rows that are there stay; ``learn`` hears of them, and of every row that is added. A context manager.

    A last line that a kill cut short is cut off. Raises UserError when another process has the file open this way, or
    when a line is none of ours: nothing has been touched then.
    """

    what: ClassVar[str]  # a row's name in messages

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    @abstractmethod
    def learn(self, row: Mapping[str, Any]) -> None: ...

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep ``row``, whose first key is ``id``: the system has it before anything else happens, so that a kill does
        not lose it. (A machine that goes down may lose the last seconds.)
        """
        self._write(json.dumps(row).encode() + b"\n")
        self.learn(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def _lock(self) -> None:
        """The kernel holds it as long as the file is open, so that a killed process leaves none."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is writing {self.path}: wait for it, or give another --out") from error

    def _read(self) -> None:
        data = self.path.read_bytes()
        for number, line in enumerate(lines := data.splitlines(keepends=True), 1):
            try:
                self.learn(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines) and is_cut(line):
                    os.truncate(self.path, len(data) - len(line))
                    return
                raise UserError(f"{self.path}:{number} is no {self.what} ({error!r}): give another --out") from error
        if data and not data.endswith(b"\n"):
            self._write(b"\n")  # cut exactly before its line end


def is_cut(line: bytes) -> bool:
    """Whether a kill may have left this of one of our rows: its beginning, and not all of it."""
    if line.endswith(b"\n") or not (line.startswith(BEGIN) or BEGIN.startswith(line)):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False
