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


def find_drafter(drafter: str | Path, embedding: Tensor) -> Path:
    """A folder as given, or the folder of a shipped drafter's name. Raises UserError when there is neither."""
    folder = Path(drafter).expanduser()
    if folder.is_dir():
        return folder
    shipped = shipped_for(embedding)
    if str(drafter) in shipped:
        return shipped[str(drafter)]
    names = ", ".join(shipped) or "none"
    raise UserError(f"no drafter {str(drafter)!r}: no such folder, and those that ship for this target are: {names}")
