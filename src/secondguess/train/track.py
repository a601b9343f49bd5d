"""The lines of the log, told to a tracker as well. Its package is an extra, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from secondguess.errors import UserError, install
from secondguess.train.config import TrainConfig


class Tracker(Protocol):
    """Hears of numbers by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._writer = package("tensorboard").SummaryWriter(folder / "tensorboard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Hosted:
    """Weights & Biases, or Trackio, which has the same interface. What is done again after an interruption is a new run
    there.
    """

    def __init__(self, name: str, config: TrainConfig) -> None:
        self._package = package(name)
        self._package.init(project="secondguess", name=Path(config.out).name, config=asdict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        self._package.finish()


def open_tracker(config: TrainConfig, folder: Path) -> Tracker | None:
    if config.track == "none":
        return None
    return TensorBoard(folder) if config.track == "tensorboard" else Hosted(config.track, config)


def check_tracker(track: str) -> None:
    """Raises UserError if the package of a tracker is missing."""
    if track != "none":
        package(track)


def package(name: str) -> ModuleType:
    try:
        return import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError:
        raise UserError(f"track={name} needs a package more: {install(name)}") from None


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by name: ``held_out/loss0/2`` is that of the third unroll step."""
    for key, value in line.items():
        if isinstance(value, list):
            value = {str(j): part for j, part in enumerate(value)}
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value
