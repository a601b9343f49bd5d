"""What a reproduction is made of: a target, its drafters, the tasks that were found, and the settings."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from secondguess.bench.tasks import ORDER, TaskPrompt, evenly_spaced, num_rows, read_task
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import weights_digest
from secondguess.drafter.model import Drafter
from secondguess.drafter.shipped import find_drafter, shipped_for
from secondguess.engine.graphs import usable
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.methods import Method, open_drafter, parse_method
from secondguess.reproduce.arms import ARMS
from secondguess.reproduce.cells import MIN_UNITS, Measurement
from secondguess.reproduce.parts import Scope
from secondguess.target.hf import HFTarget


@dataclass(frozen=True, slots=True)
class World:
    """``folders`` and ``digests`` of drafters by name; ``rows``: all of each task that was found."""

    args: argparse.Namespace
    record: Mapping[str, Any]  # of the command, see ``commands.record``
    target: HFTarget
    scope: Scope
    folders: Mapping[str, Path]
    digests: Mapping[str, str]
    rows: Mapping[str, list[TaskPrompt]]
    loaded: dict[Path, Drafter]
    texts: Path | None = None  # where plain texts are kept; the user's cache if not given

    def prompts(self, m: Measurement) -> list[TaskPrompt]:
        """As many as the flags say; of those that are decoded together so many that there are batches enough for an
        interval, as far as the rows reach, and all are full.
        """
        return [p for task in m.tasks for p in subset(self.rows[task], self.limit(m, task), self.args.seed)]

    def limit(self, m: Measurement, task: str) -> int:
        """How many prompts of a task a measurement takes, at most."""
        size = m.at.batch_size
        if m.kind != "live":
            return self.args.limit
        if size == 1:
            return self.args.live_limit
        num_batches = max(ceil(self.args.live_limit / size), MIN_UNITS)
        return size * min(num_batches, sum(len(row.turns) for row in self.rows[task]) // size)

    def made_of(self, m: Measurement) -> dict[str, Any]:
        """All that a measurement's result depends on: a change of it is another measurement."""
        prompts = [[p.task, p.id, p.turns, p.stop] for p in self.prompts(m)]
        timed = {"machine": self.record["machine"], "versions": self.record["versions"]} if m.kind == "live" else {}
        return {
            "target": self.target.fingerprint,
            "dtype": str(self.target.spec.dtype),
            "device": self.target.spec.device.type,
            "drafter": self.digests[m.variant.drafter],
            **asdict(m),
            "tree": asdict(method_of(m).tree),
            "prompts": digest(prompts),
            "seed": self.args.seed,
            "max_new_tokens": self.args.max_new_tokens,
            **timed,
        }

    def with_args(self, **changes: Any) -> argparse.Namespace:
        """The command's flags as another command would have them."""
        return argparse.Namespace(**vars(self.args) | changes)


def make_world(
    args: argparse.Namespace, record: Mapping[str, Any], target: HFTarget, arms: Mapping[str, Path]
) -> World:
    """Raises UserError when a drafter that is given does not do, or none of the tasks is found."""
    loaded: dict[Path, Drafter] = {}
    folders, lacking_drafters = find_arms(target, arms, loaded)
    rows, lacking_tasks = find_tasks(args.tasks, args.data_dir)
    sizes = {task: len(found) for task, found in rows.items()}
    scope = Scope(sizes, lacking_tasks, lacking_drafters, args.budgets, args.temperatures, usable(target.spec.device))
    digests = {name: weights_digest(folder) for name, folder in folders.items()}
    return World(args, record, target, scope, folders, digests, rows, loaded)


def find_arms(
    target: HFTarget, given: Mapping[str, Path], loaded: dict[Path, Drafter]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Folders by name, and why there is none for the others: a drafter is given, or ships for the target.

    Those that are given are loaded. Raises UserError when one of them is no drafter of this target, or cannot do what
    its row needs.
    """
    shipped = run(shipped_for, target.embedding)
    folders: dict[str, Path] = {}
    lacking: dict[str, str] = {}
    for name, variant in ARMS.items():
        if name in given:
            folder = str(given[name])
            run(open_drafter, parse_method(variant.method, TreeConfig()), target, folder, loaded)
            folders[name] = run(find_drafter, folder, name, target.embedding)
        elif name in shipped:
            folders[name] = shipped[name]
        else:
            lacking[name] = f"no drafter {name} ships for this target: --arm {name}=FOLDER gives one"
    return folders, lacking


def find_tasks(names: Sequence[str], data_dir: Path | None) -> tuple[dict[str, list[TaskPrompt]], dict[str, str]]:
    """All rows of the tasks that there are, and why there are none of the others."""
    rows: dict[str, list[TaskPrompt]] = {}
    lacking: dict[str, str] = {}
    for name in ORDER:
        if name not in names:
            lacking[name] = f"{name} is not among --tasks"
            continue
        try:
            rows[name] = read_task(name, name, data_dir)
        except UserError as error:
            lacking[name] = str(error)
    if not rows:
        raise UserError(lacking[names[0]])
    return rows, lacking


def subset(rows: list[TaskPrompt], limit: int, seed: int) -> list[TaskPrompt]:
    """As ``load_tasks`` takes them."""
    return evenly_spaced(rows, num_rows(rows, limit), seed)


def method_of(m: Measurement) -> Method:
    """The method under a name that no other drafter's has."""
    parsed = parse_method(m.variant.method, TreeConfig(budget=m.at.budget))
    return Method(m.variant.name, parsed.name, parsed.tree)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def figures_folder(m: Measurement) -> str:
    """Where a diagnosis leaves its figures, in the run folder."""
    return f"diagnosis-B{m.at.budget}-T{m.at.temperature:g}"
