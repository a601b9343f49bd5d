"""Where a drafter is: a folder, one that ships (``secondguess/drafters/TARGET/NAME``), or one of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor

from secondguess.errors import UserError, require
from secondguess.target.fingerprint import embedding_fingerprint

SHIPPED = Path(__file__).parent.parent / "drafters"
HUB_ID = re.compile(r"[\w.-]*\w/\w[\w.-]*")
ELSEWHERE = "FOLDER"  # stands for a drafter that has no name for others
PATTERNS = ["*.json", "*.safetensors", "*.bin"]


def shipped_for(embedding: Tensor) -> dict[str, Path]:
    """Names and folders of the drafters that ship for the target with this embedding."""
    ours = embedding_fingerprint(embedding)
    found = {}
    for path in sorted(SHIPPED.glob("*/*/config.json")):
        if json.loads(path.read_text())["secondguess"]["target_embedding"] == ours:
            found[path.parent.name] = path.parent
    return found


def public_name(drafter: str) -> str:
    """What others find a drafter under: its hub id, or the name of one that ships; ``FOLDER`` for one of this machine.

    ``none`` stays what it is.
    """
    here = Path(drafter).expanduser().is_dir()
    known = {"none"} | {path.parent.name for path in SHIPPED.glob("*/*/config.json")}
    return drafter if not here and (drafter in known or HUB_ID.fullmatch(drafter)) else ELSEWHERE


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a training run; a drafter among them has its ``public_name``."""
    named = ("warm_start", "anchor_to")
    return {name: public_name(value) if name in named else value for name, value in settings.items()}


def find_alone(drafter: str) -> Path:
    """As ``find_drafter``, without a target: a folder, ``TARGET/NAME``, a name that ships for one target, a hub id."""
    if (folder := Path(drafter).expanduser()).is_dir():
        return folder
    shipped = {f"{path.parent.parent.name}/{path.parent.name}": path.parent for path in SHIPPED.glob("*/*/config.json")}
    found = [path for name, path in shipped.items() if drafter in (name, path.name)]
    if len(found) == 1:
        return found[0]
    return find_on_hub(drafter, f"those that ship are {', '.join(sorted(shipped))}")


def find_drafter(drafter: str | Path | None, default: str, embedding: Tensor) -> Path:
    """The folder of a drafter: as given, shipped under the name given, or under ``default`` when none is given; else
    one of the hub, downloaded.

    A folder that happens to be called like the default (``pr``) is taken only when it is asked for. Raises UserError
    when there is no such drafter.
    """
    require(drafter != "", "the drafter's name is empty: give a folder, one that ships, or leave it out")
    if drafter is not None and (folder := Path(drafter).expanduser()).is_dir():
        return folder
    name, shipped = str(drafter or default), shipped_for(embedding)
    if name in shipped:
        return shipped[name]
    others = f"those that ship for this target are: {', '.join(shipped) or 'none'}"
    if drafter is None:
        raise UserError(f"no drafter {name!r}: no such drafter ships; {others}")
    return find_on_hub(name, others)


def find_on_hub(name: str, others: str) -> Path:
    """Where the hub's drafter of that name was downloaded to. Raises UserError, which tells of ``others``, if there is
    none; only an OWNER/NAME is looked for.
    """
    if not HUB_ID.fullmatch(name):
        raise UserError(f"no drafter {name!r}: no such folder; {others}")
    try:
        return download(name)
    except UserError as error:
        raise UserError(f"no drafter {name!r}: no such folder, and {error}; {others}") from error


def download(name: str) -> Path:
    """A drafter of the hub. Raises UserError if the hub does not give it."""
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS, etag_timeout=5))
    except (OSError, ValueError) as error:  # unreachable, unknown, gated, or no possible id
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"the hub did not give it ({reason})") from error
