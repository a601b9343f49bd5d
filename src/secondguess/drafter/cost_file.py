"""Measured costs, kept in the user's cache for a day."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from secondguess.atomic import replacing
from secondguess.cache import cache_dir
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.stopwatch import batches, measure
from secondguess.engine.costs import CostModel
from secondguess.kernels.build import sources_digest
from secondguess.machine import describe
from secondguess.target.base import Target

FORMAT = 2  # raise it when the stopwatch times something else
MAX_AGE_S = 24 * 3600

log = logging.getLogger(__name__)


def find_costs(target: Target, drafter: Drafter, config: TreeConfig, max_batch: int) -> CostModel:
    """As measured within the last day in the same circumstances, else measured now. Remove the file to measure anew."""
    made_of = circumstances(target, drafter, config, max_batch)
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()
    path = cache_dir() / "costs" / f"{digest[:16]}.json"
    if costs := read(path):
        return costs
    log.info("measuring what drafts and their verification cost")
    costs = measure(target, drafter, config, max_batch)
    with suppress(OSError):  # where nothing can be kept, every start measures
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"made_of": made_of, "costs": asdict(costs)}, indent=2, default=str) + "\n")
    return costs


def circumstances(target: Target, drafter: Drafter, config: TreeConfig, max_batch: int) -> dict[str, Any]:
    """All that costs depend on, but for what else the machine has to do. (A target's fingerprint tells its dtype.)"""
    return {
        "format": FORMAT,
        "machine": describe(),
        "versions": {name: version(name) for name in ("secondguess", "torch")},
        "code": [target.forward_id, sources_digest()],  # the version stands still between releases
        "target": target.fingerprint,
        "device": str(target.spec.device),
        "drafter": asdict(drafter.config),
        "tree": asdict(config),
        "batches": batches(max_batch),
    }


def read(path: Path) -> CostModel | None:
    """None if there is no such file, or it is old or damaged."""
    try:
        if time.time() - path.stat().st_mtime > MAX_AGE_S:
            return None
        return CostModel.from_json(json.loads(path.read_text())["costs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
