"""Rows of public data sets on the hub, in the form of our JSONL files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from secondguess.errors import UserError

MADE = ("id", "turns", "reference")


def hub_rows(name: str, hub: Mapping[str, Any], otherwise: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows ``{"id", "turns"}`` and, if it is known, ``"reference"``, each with the name of its place.

    ``hub``: ``id``, ``turns`` and ``reference`` are made of a row's columns (and ``{index}``), everything else goes to
    ``datasets.load_dataset``. Raises UserError, ending with ``otherwise``, when that is missing or fails.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"task {name!r} comes from the hub through datasets: pip install datasets, or {otherwise}"
        ) from error
    where = {key: value for key, value in hub.items() if key not in MADE}
    try:
        rows = load_dataset(**where)
    except Exception as error:  # unreachable, gone, renamed: the library raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"the hub did not give task {name!r} ({reason}): {otherwise}") from error
    for index, row in enumerate(rows):
        yield f"{name} on the hub, row {index}", convert(dict(row), hub, index)


def convert(row: dict[str, Any], hub: Mapping[str, Any], index: int) -> dict[str, Any]:
    """``turns`` is a list of templates, or ``"{column}"`` for a column that is a list of turns already."""
    columns = {key: "\n".join(value) if isinstance(value, list) else value for key, value in row.items()}
    turns = hub["turns"]
    if isinstance(turns, str):
        made = list(row[turns.strip("{}")])
    else:
        made = [template.format_map(columns).strip() for template in turns]
    known = {"reference": hub["reference"].format_map(columns)} if "reference" in hub else {}
    return {"id": hub["id"].format_map(columns | {"index": index}), "turns": made} | known
