"""Why numbers differ from the paper's, as somebody who looked into it wrote it down.

A line each, ``#`` begins a comment::

    table1 | PR over EAGLE-3.1: the drafters have read a thousandth of the paper's data.
    table9 | PR / EAGLE-3.1 | B = 48 | cycle ratio: a CPU is not idle while it reads weights.

Before the colon stands the beginning of a place: table, row, column, quantity. The longest one that fits is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from secondguess.errors import UserError
from secondguess.reproduce.cells import Place
from secondguess.reproduce.outcome import Outcome

Beginning = tuple[str, ...]  # of ``names``


def names(place: Place) -> Beginning:
    return (place.table, place.row, place.column, place.quantity)


def read_explanations(path: Path, places: Iterable[Place]) -> dict[Beginning, str]:
    """``places``: all that there are. Raises UserError where a line is of none of them, or says nothing."""
    known = {names(place)[:length] for place in places for length in range(1, 5)}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--explain {path} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        where, _, sentence = line.partition(":")
        beginning = tuple(part.strip() for part in where.split("|"))
        if beginning not in known or not sentence.strip():
            raise UserError(f"{path}:{number}: no such cell, or no words: write TABLE | ROW | COLUMN | QUANTITY: words")
        found[beginning] = sentence.strip()
    return found


def explained(outcomes: Sequence[Outcome], explanations: Mapping[Beginning, str]) -> list[Outcome]:
    """``outcomes``, those that differ with what is said of them."""
    return [replace(o, explanation=explanation(o.cell.place, explanations)) if o.differs else o for o in outcomes]


def explanation(place: Place, explanations: Mapping[Beginning, str]) -> str:
    beginnings = (names(place)[:length] for length in (4, 3, 2, 1))
    return next((explanations[b] for b in beginnings if b in explanations), "")
