"""The table of ``quality``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

COLUMNS = ("engine", "numbers", "mean KL", "largest", "same top-1", "right", "95 %")


def rich_table(rows: Sequence[dict[str, Any]]) -> Table:
    count, tokens = rows[0]["num_prompts"], rows[0]["num_tokens"]
    title = f"against float32 over its {count} answers, {tokens:,} tokens; KL in nats per token"
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, cells(row)))
    return table


def cells(row: dict[str, Any]) -> list[str]:
    graded = row["right"] is not None
    return [
        row["engine"],
        row["dtype"],
        f"{row['mean_kl']:.2g}",
        f"{row['largest_kl']:.2g}",
        f"{row['same_top1']:.2%}",
        f"{row['right']:.1%} of {row['num_graded']}" if graded else "-",
        f"{row['right_low']:.0%}-{row['right_high']:.0%}" if graded else "",
    ]
