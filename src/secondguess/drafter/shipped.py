"""Drafters that ship with the package: ``secondguess/drafters/TARGET/NAME``."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from secondguess.errors import UserError
from secondguess.target.fingerprint import embedding_fingerprint

SHIPPED = Path(__file__).parent.parent / "drafters"


def shipped_for(embedding: Tensor) -> dict[str, Path]:
    """Names and folders of the drafters that ship for the target with this embedding."""
    ours = embedding_fingerprint(embedding)
    found = {}
    for path in sorted(SHIPPED.glob("*/*/config.json")):
        if json.loads(path.read_text())["secondguess"]["target_embedding"] == ours:
            found[path.parent.name] = path.parent
    return found


def find_alone(drafter: str) -> Path:
    """As ``find_drafter``, without a target: a folder, ``TARGET/NAME`` or a name that ships for one target only."""
    if (folder := Path(drafter).expanduser()).is_dir():
        return folder
    shipped = {f"{path.parent.parent.name}/{path.parent.name}": path.parent for path in SHIPPED.glob("*/*/config.json")}
    found = [path for name, path in shipped.items() if drafter in (name, path.name)]
    if len(found) != 1:
        raise UserError(f"no drafter {drafter!r}: no such folder; those that ship are {', '.join(sorted(shipped))}")
    return found[0]


def find_drafter(drafter: str | Path | None, default: str, embedding: Tensor) -> Path:
    """The folder of a drafter: as given, or shipped under the name given, or under ``default`` when none is given.

    A folder that happens to be called like the default (``pr``) is taken only when it is asked for. Raises UserError
    when there is no such drafter.
    """
    if drafter is not None and (folder := Path(drafter).expanduser()).is_dir():
        return folder
    name, shipped = str(drafter or default), shipped_for(embedding)
    if name in shipped:
        return shipped[name]
    names = ", ".join(shipped) or "none"
    what = "no such drafter ships" if drafter is None else "no such folder"
    raise UserError(f"no drafter {name!r}: {what}; those that ship for this target are: {names}")
