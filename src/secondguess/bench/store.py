"""A run folder: ``settings.json``, and ``requests.jsonl`` with a line per finished request, so that a run can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secondguess.atomic import check_folder, replacing, whole_lines
from secondguess.bench.result import Key, Result
from secondguess.bench.signed import signed, unsigned
from secondguess.errors import UserError


class Store:
    """The results of one run. Raises UserError if it cannot be a folder, or holds a run with other settings."""

    def __init__(self, folder: Path, settings: dict[str, Any], revision: str) -> None:
        self.folder, self.revision = folder, revision
        self.results: dict[Key, Result] = {}
        self.revisions = {revision}  # of the code that all of them were made with
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(folder / "settings.json", json.loads(json.dumps(settings)))
        self._requests = folder / "requests.jsonl"
        if self._requests.exists():
            self._read()

    def add(self, results: Sequence[Result]) -> None:
        """Keep the results of one group, on disk before anything else happens."""
        lines = [signed(r.line() | {"revision": self.revision}) for r in results]
        with self._requests.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self.results |= {r.key: r for r in results}

    def _claim(self, path: Path, settings: dict[str, Any]) -> None:
        if not path.exists():
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            return
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is damaged ({error}): give another --out") from error
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            raise UserError(f"{self.folder} holds a run with other settings ({', '.join(changed)}): give another --out")

    def _read(self) -> None:
        results = []
        for number, line in enumerate(whole_lines(self._requests), 1):
            try:
                fields = unsigned(line)
                results.append(Result.from_line(fields))
                self.revisions.add(fields["revision"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(f"{self._requests}:{number} is damaged ({error!r}): remove the line") from error
        self.results = {r.key: r for r in results if r.error is None}  # what failed is tried again
