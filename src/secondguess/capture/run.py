"""States of known sequences, stored: what a drafter is trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from secondguess.atomic import check_folder
from secondguess.capture.source import FeatureSource, Live, batched_by_length
from secondguess.capture.store import States, StateStore, describe, fingerprint
from secondguess.errors import require
from secondguess.target.base import Target


def plan_capture(target: Target, sequences: Sequence[Sequence[int]], folder: Path) -> StateStore:
    """Where the states of ``sequences`` lie under ``folder``, there or not yet; nothing is written.

    The name holds the target's weights and the token ids, so that what exists can be kept. Raises UserError if a file
    stands in the folder's way.
    """
    check_folder(folder)
    return StateStore(folder / fingerprint(target.fingerprint, sequences), [len(ids) for ids in sequences])


def fill(
    store: StateStore,
    source: FeatureSource,
    made_by: str,
    on_tokens: Callable[[int], None],
    shards: Sequence[int] | None = None,
) -> None:
    """Capture shards, by default the missing ones. ``made_by``: a name of the target, for the note beside them.

    ``on_tokens`` hears how many more tokens were done.
    """
    lengths, missing = store.lengths, store.missing if shards is None else shards
    describe(store.folder, {"target": made_by, "sequences": len(lengths), "tokens": sum(lengths)})
    for shard in missing:
        states: dict[int, States] = {}
        for group in batched_by_length({i: lengths[i] for i in store.shards[shard]}):
            states |= zip(group, source.read(group), strict=True)
            on_tokens(sum(lengths[i] for i in group))
        store.write(shard, [states[i] for i in store.shards[shard]])


def capture(target: Target, sequences: Sequence[Sequence[int]], folder: Path) -> StateStore:
    """Capture states of ``sequences`` under ``folder``; shards that exist are kept."""
    store = plan_capture(target, sequences, folder)
    fill(store, Live(target, sequences), target.fingerprint, lambda n: None)
    return store


def disk_need(target: Target, num_tokens: int) -> int:
    """Bytes on disk: four bfloat16 states and an int32 per token."""
    return num_tokens * (8 * target.spec.hidden_size + 4)


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises UserError if ``num_bytes`` more do not fit where ``folder`` is, or will be."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    room = f"captured states take {num_bytes / 1e9:.2f} GB more, and {nearest} has room for {free / 1e9:.2f}"
    require(num_bytes <= free, f"{room}: choose another folder, or train with captures=none")
