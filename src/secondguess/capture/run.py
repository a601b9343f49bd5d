"""Run the target over known sequences and store what a drafter is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from secondguess.capture.store import States, StateStore, describe, fingerprint
from secondguess.target.base import Target
from secondguess.types import Rows

BATCH_TOKENS = 2048


def capture(
    target: Target, sequences: Sequence[Sequence[int]], folder: Path, on_tokens: Callable[[int], None] = lambda n: None
) -> StateStore:
    """Capture states of ``sequences`` under ``folder``; shards that exist are kept (their name holds what made them).

    ``on_tokens`` hears how many tokens were done. Needs 8 bytes x hidden size of disk per token.
    """
    lengths = [len(ids) for ids in sequences]
    key = fingerprint(target.fingerprint, sequences)
    store = StateStore(folder / key, lengths)
    describe(store.folder, {"target": target.fingerprint, "sequences": len(lengths), "tokens": sum(lengths)})
    on_tokens(sum(lengths) - sum(lengths[i] for n in store.missing for i in store.shards[n]))
    for shard in store.missing:
        states: dict[int, States] = {}
        for group in batched_by_length(store.shards[shard], lengths):
            states.update(zip(group, forward_states(target, [sequences[i] for i in group]), strict=True))
            on_tokens(sum(lengths[i] for i in group))
        store.write(shard, [states[i] for i in store.shards[shard]])
    return store


def batched_by_length(indices: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Groups of similar length, so that little is padding."""
    group: list[int] = []
    for i in sorted(indices, key=lambda i: lengths[i]):
        if group and lengths[i] * (len(group) + 1) > BATCH_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def forward_states(target: Target, sequences: Sequence[Sequence[int]]) -> list[States]:
    """States of each sequence: one causal forward over all of them."""
    R, N = len(sequences), max(map(len, sequences))
    device = target.embedding.device
    tokens_RN = torch.zeros(R, N, dtype=torch.int64)
    for r, ids in enumerate(sequences):
        tokens_RN[r, : len(ids)] = torch.tensor(ids)
    index_RN = torch.arange(N, device=device).expand(R, N)
    rows = Rows(
        slots_R=torch.arange(R, device=device),
        tokens_RN=tokens_RN.to(device),
        positions_RN=index_RN,
        columns_RN=index_RN,
        visible_RNW=torch.ones(N, N, dtype=torch.bool, device=device).tril().expand(R, N, N),
        column_positions_RW=index_RN,
    )
    out = target.forward(rows, target.new_cache(R, N))
    hidden_RN4H = torch.cat([out.taps_RNLH, out.hidden_RNH[:, :, None]], dim=2).to("cpu", torch.bfloat16)
    best_RN = out.logits_RNV.argmax(dim=-1).to("cpu", torch.int32)
    return [States(hidden_RN4H[r, : len(ids)], best_RN[r, : len(ids)]) for r, ids in enumerate(sequences)]
