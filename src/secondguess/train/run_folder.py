"""A training run on disk.

run.yaml                 the settings in full
record.json              of every session: the step that it began at, command, versions, machine, processes
log.jsonl, curves.png    a line for every evaluation; the same drawn, if matplotlib is there
resume.pt                the state to go on from
drafter-latest/          the drafter of that state, as it would be served
drafter/                 the drafter in the end
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from secondguess.atomic import check_folder, replacing
from secondguess.errors import UserError
from secondguess.train.config import TrainConfig, dump_config

# What decides no result: where things lie, what computes, what is measured on the way and who is told.
OUTSIDE = (
    "responses", "out", "trust_remote_code", "captures", "warm_start", "anchor_to", "eval_every", "eval_budget",
    "eval_responses", "save_every", "device", "parallel", "track",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Reads before it writes: nothing on disk changes until ``start``.

    ``inputs`` names what the settings do not hold but a run depends on (weights, data), as plain values.
    """

    path: Path
    config: TrainConfig
    inputs: Mapping[str, Any]

    @property
    def log_path(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def drafter(self) -> Path:
        return self.path / "drafter"

    @property
    def latest_drafter(self) -> Path:
        return self.path / "drafter-latest"

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, if there is one. Raises UserError if it is of a run with other settings or data."""
        check_folder(self.path)
        path = self.path / "resume.pt"
        if not path.exists():
            return None
        try:
            state = read_state(path)
            theirs, log_bytes = dict(state["identity"]), int(state["log_bytes"])
        except Exception:  # unpickling what is no pickle raises nearly anything
            raise UserError(f"{path} is damaged: remove it to start again, or choose another out folder") from None
        if not self.log_path.is_file() or self.log_path.stat().st_size < log_bytes:
            raise UserError(f"{self.log_path} has lost lines: remove {path} to start again")
        ours = self._identity()
        changed = [key for key, value in ours.items() if theirs.get(key) != value]
        if changed:
            raise UserError(f"{self.path} holds a run with another {', '.join(changed)}: choose another out folder")
        return state

    def start(self, record: Mapping[str, Any], step: int, log_bytes: int) -> None:
        """Write what the run is and who goes on with it from ``step``, and cut the log back to there."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_text("run.yaml", dump_config(self.config))
        sessions = [*(self.records() if step else []), {"from_step": step, **record}]
        self._write_text("record.json", json.dumps(sessions, indent=1) + "\n")
        if step == 0:  # an earlier run's drafter would pass for this one's
            (self.drafter / "config.json").unlink(missing_ok=True)
        with self.log_path.open("a") as file:
            file.truncate(log_bytes)

    def records(self) -> list[dict[str, Any]]:
        """Of the sessions so far; of a run that kept one record, that one."""
        path = self.path / "record.json"
        found = json.loads(path.read_text()) if path.is_file() else []
        return found if isinstance(found, list) else [found]

    def log(self, line: Mapping[str, Any]) -> None:
        with self.log_path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log_lines(self) -> list[dict[str, Any]]:
        with self.log_path.open() as file:
            return [json.loads(line) for line in file]

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep ``state`` and the size of the log, so that lines of lost steps are cut off."""
        whole = {"identity": self._identity(), "log_bytes": self.log_path.stat().st_size, **state}
        with replacing(self.path / "resume.pt") as temporary:
            torch.save(whole, temporary)

    @property
    def settings(self) -> dict[str, Any]:
        """Those that decide the result."""
        return {key: value for key, value in self.config.decisive.items() if key not in OUTSIDE}

    def _identity(self) -> dict[str, Any]:
        return {**self.settings, **self.inputs}

    def _write_text(self, name: str, text: str) -> None:
        with replacing(self.path / name) as temporary:
            temporary.write_text(text)


def read_state(path: Path) -> dict[str, Any]:
    """What ``save`` wrote. ``torch.save`` writes checksums, but ``torch.load`` does not look at them."""
    with zipfile.ZipFile(path) as file:
        if (damaged := file.testzip()) is not None:
            raise zipfile.BadZipFile(damaged)
    return torch.load(path, map_location="cpu", weights_only=True)
