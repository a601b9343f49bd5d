"""States of known sequences, stored: what a drafter is trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from secondguess.atomic import check_folder
from secondguess.capture.source import FeatureSource, Live, batched_by_length
from secondguess.capture.store import States, StateStore, describe, folder_name, former_name
from secondguess.errors import require
from secondguess.target.base import Target, default_tap_layers


def plan_capture(
    target: Target, sequences: Sequence[Sequence[int]], folder: Path, tap_layers: tuple[int, ...] | None = None
) -> StateStore:
    """Where the states of ``sequences`` lie under ``folder``, there or not yet; nothing is written.

    A folder is of one target and ``tap_layers`` (see ``FeatureSource``), so that what exists can be kept and is not
    taken for another's. Raises UserError if a file stands in the folder's way, or a shard is damaged.
    """
    check_folder(folder)
    former = folder / former_name(target.fingerprint, sequences, tap_layers)
    here = folder / folder_name(target.fingerprint, tap_layers)
    return StateStore(here, sequences, tap_layers, former if former.is_dir() else None)


def fill(
    store: StateStore,
    source: FeatureSource,
    made_by: str,
    on_tokens: Callable[[int], None],
    shards: Sequence[Sequence[int]] | None = None,
) -> None:
    """Capture shards of sequences, by default the missing ones. ``made_by``: a name of the target, for the note beside
    them.

    ``on_tokens`` hears how many more tokens were done.
    """
    lengths, shards = store.lengths, store.missing if shards is None else shards
    describe(store.folder, {"target": made_by, "tap_layers": store.tap_layers})
    for shard in shards:
        states: dict[int, States] = {}
        for group in batched_by_length({i: lengths[i] for i in shard}, source.batch_tokens):
            states |= zip(group, source.read(group), strict=True)
            on_tokens(sum(lengths[i] for i in group))
        store.write(shard, [states[i] for i in shard])


def capture(
    target: Target, sequences: Sequence[Sequence[int]], folder: Path, tap_layers: tuple[int, ...] | None = None
) -> StateStore:
    """Capture states of ``sequences`` under ``folder``; shards that exist are kept. As ``plan_capture``."""
    store = plan_capture(target, sequences, folder, tap_layers)
    fill(store, Live(target, sequences, tap_layers), target.fingerprint, lambda n: None)
    return store


def disk_need(target: Target, store: StateStore) -> int:
    """Bytes on disk that the missing shards take: the taps and the last state in bfloat16, and an int32 per token."""
    layers = store.tap_layers or default_tap_layers(target.spec.num_layers)
    return store.tokens(store.missing) * (2 * (len(layers) + 1) * target.spec.hidden_size + 4)


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises UserError if ``num_bytes`` more do not fit where ``folder`` is, or will be."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    room = f"captured states take {num_bytes / 1e9:.2f} GB more, and {nearest} has room for {free / 1e9:.2f}"
    require(num_bytes <= free, f"{room}: choose another folder, or train with captures=none")
