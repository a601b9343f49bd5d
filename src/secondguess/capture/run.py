"""Run the target over known sequences and store what a drafter is trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from secondguess.atomic import check_folder
from secondguess.capture.store import States, StateStore, describe, fingerprint
from secondguess.errors import require
from secondguess.target.base import Target, causal_rows

BATCH_TOKENS = 2048


def plan_capture(target: Target, sequences: Sequence[Sequence[int]], folder: Path) -> StateStore:
    """Where the states of ``sequences`` lie under ``folder``, there or not yet; nothing is written.

    The name holds the target's weights and the token ids, so that what exists can be kept. Raises UserError if a file
    stands in the folder's way.
    """
    check_folder(folder)
    return StateStore(folder / fingerprint(target.fingerprint, sequences), [len(ids) for ids in sequences])


def fill(
    store: StateStore, target: Target, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None]
) -> None:
    """Capture the missing shards. ``on_tokens`` hears how many more tokens were done."""
    lengths, missing = store.lengths, store.missing
    describe(store.folder, {"target": target.fingerprint, "sequences": len(lengths), "tokens": sum(lengths)})
    for shard in missing:
        states: dict[int, States] = {}
        for i, found in run_target(target, sequences, store.shards[shard]):
            states[i] = found
            on_tokens(lengths[i])
        store.write(shard, [states[i] for i in store.shards[shard]])


def run_target(
    target: Target, sequences: Sequence[Sequence[int]], indices: Sequence[int]
) -> Iterator[tuple[int, States]]:
    """The states of the sequences ``indices``, shortest first, each with its index."""
    for group in batched_by_length({i: len(sequences[i]) for i in indices}):
        yield from zip(group, forward_states(target, [sequences[i] for i in group]), strict=True)


def capture(target: Target, sequences: Sequence[Sequence[int]], folder: Path) -> StateStore:
    """Capture states of ``sequences`` under ``folder``; shards that exist are kept."""
    store = plan_capture(target, sequences, folder)
    fill(store, target, sequences, lambda n: None)
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


def batched_by_length(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """Groups of similar length, so that little is padding."""
    group: list[int] = []
    for i in sorted(lengths, key=lengths.__getitem__):
        if group and lengths[i] * (len(group) + 1) > BATCH_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def forward_states(target: Target, sequences: Sequence[Sequence[int]]) -> list[States]:
    """States of each sequence: one causal forward over all of them."""
    device = target.embedding.device
    tokens_RN = pad_sequence([torch.tensor(ids, device=device) for ids in sequences], batch_first=True)
    slots_R = torch.arange(len(sequences), device=device)
    out = target.forward(causal_rows(slots_R, tokens_RN), target.new_cache(*tokens_RN.shape))
    hidden_RN4H = torch.cat([out.taps_RNLH, out.hidden_RNH[:, :, None]], dim=2).to("cpu", torch.bfloat16)
    best_RN = out.logits_RNV.argmax(dim=-1).to("cpu", torch.int32)
    return [States(hidden_RN4H[r, : len(ids)], best_RN[r, : len(ids)]) for r, ids in enumerate(sequences)]
