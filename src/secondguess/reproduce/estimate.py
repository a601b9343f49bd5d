"""Numbers of cells, and their intervals, from records. Pure functions.

P units of a record (texts, or groups decoded together), C conversations that they are turns of, S resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from secondguess.bench.acceptance import RESAMPLES
from secondguess.bench.diagnosis import ALL
from secondguess.reproduce.cells import BASE_OF, MIN_UNITS, Place
from secondguess.reproduce.records import Record

INTERVAL = (2.5, 97.5)

Sums = Mapping[str, Any]  # numbers, or arrays [S], by column
STATS: dict[str, Callable[[Sums], Any]] = {
    "tau": lambda s: s["emitted"] / s["cycles"],
    "speedup": lambda s: (s["tokens"] / s["seconds"]) / (s["plain tokens"] / s["plain seconds"]),
    "cycle ms": lambda s: 1000 * s["seconds"] / s["cycles"],
}


@dataclass(frozen=True, slots=True)
class Value:
    """A number and its 95 % interval, None where there are too few units for one. Turns of a conversation are one.

    ``with_loops``: the number over all units; the others leave out those whose plain text loops.
    """

    value: float
    low: float | None
    high: float | None
    num_units: int
    num_tasks: int = 1
    with_loops: float | None = None


def estimate(quantity: str, ours: Sequence[Record], over: Sequence[Record]) -> Value | None:
    """A number averaged over tasks; relative to ``over``, of the same tasks and units, if that is given.

    Percentile bootstrap over the conversations of each task; both methods' share of a unit stays together. None where
    nothing was decoded, or where every text loops. Every record has a unit at least.
    """
    kept = [np.array(record.column("looping")) == 0 for record in ours]
    everything = number(quantity, ours, over, [np.ones(len(k)) for k in kept])
    flowing = [i for i, k in enumerate(kept) if k.any()]
    ours, over = [ours[i] for i in flowing], [over[i] for i in flowing if over]
    masks = [kept[i] for i in flowing]
    rows = [np.array(record.column("row"))[mask] for record, mask in zip(ours, masks, strict=True)]
    num_units = sum(len(np.unique(row_P)) for row_P in rows)
    value = number(quantity, ours, over, [mask.astype(float) for mask in masks])
    if value is None or not np.isfinite(value):
        return None
    low = high = None
    if num_units >= MIN_UNITS * len(masks):
        drawn = [resampled(*each, stream) for stream, each in enumerate(zip(masks, rows, strict=True))]
        values_S = number(quantity, ours, over, drawn)
        low, high = map(float, np.nanpercentile(values_S, INTERVAL))
    return Value(float(value), low, high, num_units, len(flowing), float(everything))


def number(quantity: str, ours: Sequence[Record], over: Sequence[Record], weights: Sequence[np.ndarray]) -> Any:
    """``weights``: how often each unit of a task counts, [P] for one number or [P, S] for many. None without a task."""
    if not ours:
        return None
    base = BASE_OF.get(quantity, quantity)
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample of texts without a cycle
        value = level(base, ours, weights)
        if over:
            value = value / level(base, over, weights)
    return value - 1 if quantity.endswith("gain") else value


def level(base: str, records: Sequence[Record], weights: Sequence[np.ndarray]) -> Any:
    """The mean over tasks."""
    return np.mean([STATS[base](sums(r, w)) for r, w in zip(records, weights, strict=True)], axis=0)


def sums(record: Record, weights: np.ndarray) -> Sums:
    table_PC = np.array(record.units)
    return {name: table_PC[:, c] @ weights for c, name in enumerate(record.columns)}


def resampled(mask: np.ndarray, rows: np.ndarray, stream: int) -> np.ndarray:
    """[P, S]: how often each unit is drawn, with its conversation; those that ``mask`` leaves out never.

    ``rows``: which conversation each of the others belongs to.
    """
    conversations_C, at_P = np.unique(rows, return_inverse=True)
    counts_PS = np.zeros((len(mask), RESAMPLES))
    counts_PS[mask] = draws(len(conversations_C), stream)[at_P]
    return counts_PS


@lru_cache(maxsize=16)
def draws(count: int, stream: int) -> np.ndarray:
    """[count, S]. ``stream``: tasks are resampled apart."""
    rng = np.random.default_rng((0, stream))
    return rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).T.astype(float)


def diagnosed(place: Place, found: Mapping[str, Any]) -> Value | None:
    """A share of a diagnosis, with its Wilson interval, or a mean change without one. None of nothing.

    Rows and columns are named as ``tables`` does: accepted tokens of a bin, or rejected ones of a bucket.
    """
    if place.column == "accepted":
        rows = (b["true"] for b in found["figure1a"] if place.row == f"drafter {b['low']:.1f}-{b['high']:.1f}")
        return value_of(next(rows))
    cell = bucket_at(place, found)
    if place.quantity.startswith("change"):
        change, hits, count = (
            cell[place.quantity.replace(" ", "_")],
            cell["recovered"]["hits"],
            cell["recovered"]["count"],
        )
        num_tokens = hits if place.quantity == "change recovered" else count - hits
        return None if change is None else Value(change, None, None, num_tokens)
    return value_of(cell["recovered" if place.quantity == "recovered" else "pool"])


def value_of(share: Mapping[str, Any]) -> Value | None:
    return None if share["share"] is None else Value(share["share"], share["low"], share["high"], share["count"])


def bucket_at(place: Place, found: Mapping[str, Any]) -> Mapping[str, Any]:
    bucket = place.row if place.column == "rejected" else f"{place.row}, {place.column}"
    drafter, _, target = bucket.removeprefix("drafter ").partition(", target ")
    return next(c for c in found["table7"] if (c["drafter"], c["target"]) == (drafter, target or ALL))
