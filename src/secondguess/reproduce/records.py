"""What has been measured: a file per measurement, named by all that it was made of, so that a run can go on."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from secondguess.atomic import check_folder, replacing
from secondguess.errors import UserError
from secondguess.reproduce.cells import Cell, Measurement, teams
from secondguess.reproduce.world import World, digest

REPLAY_COLUMNS = ("row", "looping", "emitted", "cycles")  # of a text
LIVE_COLUMNS = ("row", "looping", "tokens", "seconds", "plain tokens", "plain seconds", "cycles")  # of a group


@dataclass(frozen=True, slots=True)
class Record:
    """The result of a measurement: ``units`` of replay and live, a row of ``columns`` each, or what a diagnosis found.

    A unit loops (1, else 0) if the plain texts of all its prompts do. Units with one number of ``row`` are turns of
    the same conversations.
    """

    seconds: float  # that it took
    tokens: int  # that it walked or decoded
    columns: tuple[str, ...] = ()
    units: Sequence[Sequence[float]] = ()
    found: dict[str, Any] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()  # texts that are not plain decoding's, failures
    session: str = ""  # of times: the job whose methods took turns, see ``commands.reproduce_run``
    revision: str = ""  # of the code

    @property
    def failed(self) -> bool:
        return not (self.units or self.found)

    def column(self, name: str) -> list[float]:
        at = self.columns.index(name)
        return [unit[at] for unit in self.units]


def numbered(names: Iterable[Hashable]) -> list[int]:
    """The same number for the same name, from 0 on in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


class Records:
    """The records of ``folder`` that are of this world, by session. Raises UserError if a file is damaged."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        check_folder(folder)
        self._known: dict[Measurement, dict[str, Record]] = {}

    def of(self, cells: Iterable[Cell]) -> dict[Measurement, Record]:
        """What has been made for ``cells``. Times that are divided by each other are of one session, the newest that
        has all of them, or count as not made: machines are not equally fast on all days.
        """
        found: dict[Measurement, Record] = {}
        for team in teams(cells):
            shared = [name for name in self.sessions(team[0]) if all(name in self.sessions(m) for m in team)]
            if shared:
                found |= {m: self.sessions(m)[shared[-1]] for m in team}
        return found

    def sessions(self, m: Measurement) -> dict[str, Record]:
        """The records of a measurement by session, the newest last. What is not timed has one, without a name."""
        if m not in self._known:
            paths = self.folder.glob(f"{self._stem(m)}{'-*' if m.kind == 'live' else ''}.json")
            records = [self._read(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
            self._known[m] = {record.session: record for record in records}
        return self._known[m]

    def add(self, results: Mapping[Measurement, Record]) -> None:
        """Keep results, each on disk before anything else happens. What failed is not: another run tries it again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for m, result in results.items():
            record = replace(result, revision=self.world.record["revision"])
            self.sessions(m)[record.session] = record
            if not record.failed:
                content = {"made_of": self.world.made_of(m), "record": self.world.record, "result": asdict(record)}
                name = "-".join(filter(None, (self._stem(m), record.session)))
                with replacing(self.folder / f"{name}.json") as temporary:
                    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _stem(self, m: Measurement) -> str:
        return f"{m.kind}-{digest(self.world.made_of(m))[:16]}"

    def _read(self, path: Path) -> Record:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            result = content["result"] | {"revision": content["record"]["revision"]}
            return Record(**result | {name: tuple(result[name]) for name in ("columns", "complaints")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error!r}): remove it, and it is measured again") from error
