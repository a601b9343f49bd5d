"""Where states come from: shards on disk, the target itself, or (``served``) a server that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from secondguess.capture.store import States
from secondguess.target.base import Target, causal_rows, default_tap_layers

PASS_TOKENS = 2048


class FeatureSource(Protocol):
    """States of a list of sequences. ``StateStore`` reads them, ``Live`` and ``Served`` make them."""

    @property
    def tap_layers(self) -> tuple[int, ...] | None:
        """Layers whose inputs the states are, in this order; None: EAGLE-3's (as ``DrafterConfig.tap_layers``)."""
        ...

    @property
    def batch_tokens(self) -> int | None:
        """Tokens, padded, of sequences that are best read at once; None: the more the better."""
        ...

    def read(self, indices: Sequence[int]) -> list[States]:
        """The states of these sequences, on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """The target runs whenever states are asked for: no disk, but a pass of the target for every epoch.

    The states are those of the shards, rounded alike: the same bits wherever the target's rows do not depend on what
    else is in the pass (float32 on the CPU).
    """

    target: Target
    sequences: Sequence[Sequence[int]]
    tap_layers: tuple[int, ...] | None = None
    batch_tokens: int | None = PASS_TOKENS

    def read(self, indices: Sequence[int]) -> list[States]:
        found: dict[int, States] = {}
        with torch.autocast(self.target.spec.device.type, enabled=False):  # a trainer's precision is its own
            for group in batched_by_length({i: len(self.sequences[i]) for i in indices}, self.batch_tokens):
                states = forward_states(self.target, [self.sequences[i] for i in group], self.tap_layers)
                found |= zip(group, states, strict=True)
        return [found[i] for i in indices]


def batched_by_length(lengths: Mapping[int, int], batch_tokens: int | None) -> Iterator[list[int]]:
    """Groups of similar length, so that little is padding, with so many tokens; None: one group."""
    group: list[int] = []
    for i in sorted(lengths, key=lengths.__getitem__):
        if group and batch_tokens is not None and lengths[i] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def forward_states(
    target: Target, sequences: Sequence[Sequence[int]], tap_layers: tuple[int, ...] | None = None
) -> list[States]:
    """States of each sequence: one causal forward over all of them. ``tap_layers``: see ``FeatureSource``."""
    device = target.embedding.device
    places = list(target.tap(tap_layers or default_tap_layers(target.spec.num_layers)))
    tokens_RN = pad_sequence([torch.tensor(ids, device=device) for ids in sequences], batch_first=True)
    slots_R = torch.arange(len(sequences), device=device)
    out = target.forward(causal_rows(slots_R, tokens_RN), target.new_cache(*tokens_RN.shape))
    hidden_RNKH = torch.cat([out.taps_RNLH[:, :, places], out.hidden_RNH[:, :, None]], dim=2)
    hidden_RNKH = hidden_RNKH.to("cpu", torch.bfloat16)
    best_RN = out.logits_RNV.argmax(dim=-1).to("cpu", torch.int32)
    return [States(hidden_RNKH[r, : len(ids)], best_RN[r, : len(ids)]) for r, ids in enumerate(sequences)]
