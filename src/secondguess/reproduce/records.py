"""What has been measured: a file per measurement, named by all that it was made of, so that a run can go on."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from secondguess.atomic import check_folder, replacing
from secondguess.errors import UserError
from secondguess.reproduce.cells import Measurement
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
    complaints: tuple[str, ...] = ()  # of a live run: texts that are not plain decoding's, failures

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
    """The records of ``folder`` that are of this world. Raises UserError if one of their files is damaged."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        check_folder(folder)
        self._known: dict[Measurement, Record] = {}
        self._paths: dict[Measurement, Path] = {}

    def __contains__(self, m: Measurement) -> bool:
        return m in self._known or self.path(m).is_file()

    def __getitem__(self, m: Measurement) -> Record:
        if m not in self._known:
            self._known[m] = self._read(self.path(m))
        return self._known[m]

    def of(self, measurements: Iterable[Measurement]) -> dict[Measurement, Record]:
        """Those of ``measurements`` that have been made."""
        return {m: self[m] for m in measurements if m in self}

    def path(self, m: Measurement) -> Path:
        if m not in self._paths:
            self._paths[m] = self.folder / f"{m.kind}-{digest(self.world.made_of(m))[:16]}.json"
        return self._paths[m]

    def add(self, results: Mapping[Measurement, Record]) -> None:
        """Keep results, each on disk before anything else happens. What failed is not: another run tries it again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for m, record in results.items():
            self._known[m] = record
            if not record.failed:
                content = {"made_of": self.world.made_of(m), "record": self.world.record, "result": asdict(record)}
                with replacing(self.path(m)) as temporary:
                    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _read(self, path: Path) -> Record:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))["result"]
            return Record(**result | {name: tuple(result[name]) for name in ("columns", "complaints")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error!r}): remove it, and it is measured again") from error
