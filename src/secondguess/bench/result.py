"""What one prompt cost with one method, and its line in ``requests.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from secondguess.types import FinishReason, Output, Stats


class Key(NamedTuple):
    """Which prompt, decoded how. Two results of one run never share it."""

    task: str
    id: str
    method: str  # as typed
    budget: int | str  # 0: the method drafts nothing; "auto"
    temperature: float
    round: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. Requests with the same ``group`` were decoded together."""

    key: Key
    group: int
    seed: int
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    text: str
    stats: Stats
    error: str | None = None  # why there is no text
    peak_memory_bytes: int = 0  # of the process that decoded, so far
    wall_s: float = 0.0  # of the group's whole call; 0 where it was not taken
    versions: Mapping[str, str] = field(default_factory=dict)  # of another engine's packages

    @classmethod
    def of(
        cls,
        key: Key,
        group: int,
        output: Output,
        peak_memory_bytes: int = 0,
        wall_s: float = 0.0,
        versions: Mapping[str, str] | None = None,
    ) -> Result:
        text = output.seed, output.finish_reason, output.token_ids, output.text
        return cls(key, group, *text, output.stats, None, peak_memory_bytes, wall_s, versions or {})

    @classmethod
    def failed(cls, key: Key, group: int, seed: int, error: str) -> Result:
        return cls(key, group, seed, "abort", (), "", Stats(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0), error)

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Result:
        line = {name: value for name, value in line.items() if name != "revision"}
        key = Key(*(line.pop(name) for name in Key._fields))
        ids, stats = tuple(line.pop("token_ids")), Stats(**line.pop("stats"))
        return cls(key=key, token_ids=ids, stats=stats, **line)

    def line(self) -> dict[str, Any]:
        return self.key._asdict() | {name: value for name, value in asdict(self).items() if name != "key"}
