"""What a model card says of acceptance: rows of ``secondguess eval --json``, kept in the checkpoint, as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from secondguess.drafter.shipped import public_name
from secondguess.errors import UserError

SETTINGS = ("grow_width", "offer_width", "num_steps", "num_reconsider")
Row = Mapping[str, Any]


def read_measured(path: Path, method: str) -> dict[str, Any]:
    """What the file says of ``method``, without the prompts whose plain text loops.

    Raises UserError when it says nothing of it, or is no result of ``eval``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows, time = found["rows"], found["record"]["time"]
        ours = [kept(row) for row in rows if row["method"] == method]
        settings = {name: row[name] for row in rows if row["method"] == method for name in SETTINGS}
        over = baseline(rows, method)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is no result of 'secondguess eval --json' ({error!r})") from error
    if not ours:
        methods = ", ".join(dict.fromkeys(row["method"] for row in rows))
        raise UserError(f"{path} has no rows of {method}, only of {methods}: evaluate --method {method}")
    place = Path(*path.parts[-2:]) if path.is_absolute() else path  # whose home it lies in is nobody's business
    made = {"record": place.as_posix(), "time": time}
    return {**made, "method": method, "settings": settings, "over": over, "rows": ours}


def kept(row: Row) -> dict[str, Any]:
    gain = [row[f"gain_nonlooping{end}"] for end in ("", "_low", "_high")]
    return {name: row[name] for name in ("task", "temperature", "budget", "num_prompts")} | {
        "acceptance_length": rounded(row["acceptance_length_nonlooping"]),
        "gain": None if None in gain else [rounded(number) for number in gain],
    }


def rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def baseline(rows: Sequence[Row], method: str) -> str | None:
    """The method that gains are counted over: the one that has none itself. None where ``method`` has none."""
    gaining = {row["method"] for row in rows if row["gain_nonlooping"] is not None}
    others = [row["method"] for row in rows if row["method"] not in gaining]
    if method not in gaining or not others:
        return None
    return re.sub(r"(?<=drafter=)[^,]+", lambda named: public_name(named[0]), others[0])


def table(measured: Mapping[str, Any]) -> list[str]:
    """Paragraphs of Markdown: a row for each task, a column for each temperature and budget."""
    rows = {(row["task"], row["temperature"], row["budget"]): row for row in measured["rows"]}
    columns = list(dict.fromkeys((temperature, budget) for _, temperature, budget in rows))
    prompts = {row["task"]: row["num_prompts"] for row in measured["rows"]}
    lines = [
        cells("task", "prompts", *(f"T = {temperature:g}, budget {budget}" for temperature, budget in columns)),
        cells("---", *["---:"] * (1 + len(columns))),
        *(
            cells(task, str(number), *(cell(rows.get((task, *column))) for column in columns))
            for task, number in prompts.items()
        ),
    ]
    settings = ", ".join(f"{name} {value}" for name, value in measured["settings"].items())
    gains = f"; gains over {measured['over']} with 95 % intervals over prompts" if measured["over"] else ""
    how = (
        f"Acceptance length (tokens a cycle) by replay of the target's plain texts, without those that loop; method "
        f"{measured['method']} ({settings}){gains}. {measured['time'][:10]}, `{measured['record']}`."
    )
    return [how, "\n".join(lines)]


def cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def cell(row: Row | None) -> str:
    """``2.79 (+1.4 % [0.5, 2.2])``"""
    if row is None or row["acceptance_length"] is None:
        return "-"
    tau = f"{row['acceptance_length']:.2f}"
    if row["gain"] is None:
        return tau
    gain, low, high = (100 * number for number in row["gain"])
    return f"{tau} ({gain:+.1f} % [{low:.1f}, {high:.1f}])"
