"""A training run on disk: ``run.yaml``, ``record.json``, ``log.jsonl``, ``resume.pt``, in the end ``drafter/``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from secondguess.atomic import check_folder, replacing
from secondguess.errors import UserError
from secondguess.train.config import TrainConfig, dump_config


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

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, if there is one. Raises UserError if it is of a run with other settings or data."""
        check_folder(self.path)
        path = self.path / "resume.pt"
        if not path.exists():
            return None
        try:
            state = torch.load(path, weights_only=True)
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

    def start(self, record: Mapping[str, Any], log_bytes: int) -> None:
        """Write what the run is, and cut the log back to where the run goes on."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_text("run.yaml", dump_config(self.config))
        self._write_text("record.json", json.dumps(record, indent=1) + "\n")
        with self.log_path.open("a") as file:
            file.truncate(log_bytes)

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

    def _identity(self) -> dict[str, Any]:
        """What decides the result: all but where it is kept."""
        settings = {key: value for key, value in asdict(self.config).items() if key not in ("out", "captures")}
        return {**settings, **self.inputs}

    def _write_text(self, name: str, text: str) -> None:
        with replacing(self.path / name) as temporary:
            temporary.write_text(text)
