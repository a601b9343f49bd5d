"""What methods cost on the same prompts, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from secondguess.engine.cycle import CycleTrace
from secondguess.types import Output, Stats


@dataclass(frozen=True, slots=True)
class Run:
    """What a method answered to a prompt; ``trace`` is its last cycle, None if prefill ended the answer."""

    method: str
    prompt: str
    output: Output
    trace: CycleTrace | None


def total(runs: Sequence[Run]) -> Stats:
    """Counts and times added up."""
    return Stats(**{f.name: sum(getattr(run.output.stats, f.name) for run in runs) for f in fields(Stats)})


def num_identical(runs: Sequence[Run], reference: Sequence[Run]) -> int:
    """How many answers have the reference's tokens."""
    return sum(a.output.token_ids == b.output.token_ids for a, b in zip(runs, reference, strict=True))


def table(by_method: dict[str, list[Run]]) -> Table:
    """One row per method over the same prompts. Plain decoding is the measure if it is there, else the first method."""
    first = "ar" if "ar" in by_method else next(iter(by_method))
    base, base_speed = by_method[first], total(by_method[first]).tokens_per_second
    against = "plain" if first == "ar" else first
    columns = ("tokens", "tokens/s", "acceptance\nlength", f"speedup\nvs {against}", f"identical\nto {against}")
    shown = Table("method", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in columns if len(by_method) > 1 else columns[:3]:
        shown.add_column(column, justify="right")
    for method, runs in by_method.items():
        stats, same = total(runs), num_identical(runs, base)
        cells = (
            str(sum(len(run.output.token_ids) for run in runs)),
            f"{stats.tokens_per_second:.1f}",
            f"{stats.acceptance_length:.2f}",
            f"{stats.tokens_per_second / base_speed:.2f}x" if base_speed else "-",
            "yes" if same == len(runs) else f"NO ({same} of {len(runs)})",
        )
        shown.add_row(Text(method), *cells[: len(shown.columns) - 1])
    return shown


def result(run: Run) -> dict[str, Any]:
    """The run as a row of a command's JSON."""
    output, stats = run.output, run.output.stats
    derived = {"acceptance_length": stats.acceptance_length, "tokens_per_second": stats.tokens_per_second}
    return {
        "method": run.method,
        "prompt": run.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "stats": asdict(stats) | derived,
    }
