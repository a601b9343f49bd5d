"""The drafters that the paper's rows need, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from secondguess.errors import UserError, did_you_mean
from secondguess.reproduce.cells import Variant

ARMS = {
    "eagle3.1": Variant("eagle3.1", "eagle3.1"),
    "pr": Variant("pr", "pr"),
    "no-balance": Variant("no-balance", "pr"),
    "no-self-query": Variant("no-self-query", "pr:query_slot=own_token"),
    "two-layer": Variant("two-layer", "eagle3.1"),
    "hass": Variant("hass", "eagle3.1"),
    "hass+pr": Variant("hass+pr", "pr"),
}


def parse_arms(texts: Sequence[str]) -> dict[str, Path]:
    """``NAME=FOLDER`` each. Raises UserError for anything else, an unknown name, or one that is given twice."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise UserError(f"--arm {text}: give NAME=FOLDER, with one of the names {', '.join(ARMS)}")
        if name not in ARMS:
            raise UserError(f"--arm {text}: unknown name{did_you_mean(name, ARMS)}; the names are {', '.join(ARMS)}")
        if name in folders:
            raise UserError(f"--arm {name} is given twice")
        folders[name] = Path(folder)
    return folders
