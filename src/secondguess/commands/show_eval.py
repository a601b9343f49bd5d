"""The tables of ``eval``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

DEPTHS_SHOWN = 3
COLUMNS = ("method", "budget", "tau", "no loops", "gain", "95 %", "depth 1", "2", "3", "refined", "accepted")


def rich_tables(rows: Sequence[dict[str, Any]], against: str) -> list[Table]:
    """One per task and temperature."""
    tables = []
    for (task, temperature), group in groupby(rows, lambda row: (row["task"], row["temperature"])):
        part = list(group)
        count, looping = part[0]["num_prompts"], part[0]["looping"]
        title = f"{task}, T = {temperature:g}, {count} prompt{'s' if count > 1 else ''}, {looping:.0%} looping; "
        title += f"gain in tau over {against}" + (", without those that loop" if looping else "")
        tables.append(table := Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)))
        for heading in COLUMNS:
            is_name = heading == "method"
            justify, overflow = ("left", "fold") if is_name else ("right", "crop")
            table.add_column(heading, justify=justify, overflow=overflow, no_wrap=not is_name)
        for row in part:
            table.add_row(*map(Text, cells(row)))
    return tables


def cells(row: dict[str, Any]) -> list[str]:
    depths = [*row["acceptance_by_depth"], *[None] * DEPTHS_SHOWN][:DEPTHS_SHOWN]
    gain, low, high = (row[f"gain_nonlooping{end}"] for end in ("", "_low", "_high"))
    interval = "" if gain is None else f"{low:+.1%} to {high:+.1%}"
    return [
        row["method"],
        str(row["budget"]),
        number(row["acceptance_length"], "{:.2f}"),
        number(row["acceptance_length_nonlooping"], "{:.2f}"),
        number(gain, "{:+.1%}", ""),
        interval,
        *(number(share, "{:.2f}") for share in depths),
        number(row["refined_drafted"], "{:.0%}"),
        number(row["refined_accepted"], "{:.0%}"),
    ]


def said_of(duel: dict[str, Any]) -> str:
    """PR's best and EAGLE-3.1's, and how they were chosen."""
    ours, theirs = (f"{duel[name]:.2f}" for name in ("acceptance_length", "acceptance_length_over"))
    gain, low, high = (f"{duel[f'gain{end}']:+.1%}" for end in ("", "_low", "_high"))
    return (
        f"At their best, T = {duel['temperature']:g}, budget {duel['budget']}: {duel['method']} {ours}, {duel['over']} "
        f"{theirs}, gain {gain}, 95 % {low} to {high}. One half of the prompts chose them; these numbers are of "
        f"{duel['num_prompts']} prompts of the other half, of which none loops."
    )


def number(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else form.format(value)
