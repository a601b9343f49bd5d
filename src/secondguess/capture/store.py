"""Target states on disk, as safetensors shards.

Per token: the tapped layers and the last hidden state (bfloat16), and the target's most likely next token (int32).
T tokens of a sequence, L tapped layers, K = L + 1 states, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from secondguess.atomic import replacing

SHARD_TOKENS = 1 << 16


def fingerprint(
    target_fingerprint: str, sequences: Sequence[Sequence[int]], tap_layers: tuple[int, ...] | None = None
) -> str:
    """What a capture depends on: the target's weights, the exact token ids, and layers other than EAGLE-3's."""
    digest = hashlib.sha256(target_fingerprint.encode())
    if tap_layers is not None:
        digest.update(repr(tap_layers).encode())
    for ids in sequences:
        digest.update(torch.tensor(ids, dtype=torch.int32).numpy().tobytes())
    return digest.hexdigest()[:16]


def plan_shards(lengths: Sequence[int]) -> list[range]:
    """Consecutive sequences whose tokens fill about one shard."""
    shards, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        tokens += length
        if tokens >= SHARD_TOKENS or i == len(lengths) - 1:
            shards.append(range(start, i + 1))
            start, tokens = i + 1, 0
    return shards


@dataclass(frozen=True, slots=True)
class States:
    """States of one sequence."""

    hidden_TKH: Tensor  # bfloat16: the taps, then the last hidden state (after the final norm)
    best_T: Tensor  # int32: the target's most likely next token

    @property
    def taps_TLH(self) -> Tensor:
        return self.hidden_TKH[:, :-1]

    @property
    def last_TH(self) -> Tensor:
        return self.hidden_TKH[:, -1]


class StateStore:
    """Captured states of a list of sequences; ``store[i]`` reads those of sequence i."""

    batch_tokens = None  # see ``FeatureSource``

    def __init__(self, folder: Path, lengths: Sequence[int], tap_layers: tuple[int, ...] | None = None) -> None:
        """``tap_layers``: see ``FeatureSource``."""
        self.folder, self.tap_layers = folder, tap_layers
        self.lengths = list(lengths)
        self.shards = plan_shards(lengths)
        self._where = {i: (n, sum(lengths[shard.start : i])) for n, shard in enumerate(self.shards) for i in shard}

    def path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"

    @property
    def missing(self) -> list[int]:
        return [n for n in range(len(self.shards)) if not self.path(n).is_file()]

    def tokens(self, shards: Iterable[int]) -> int:
        return sum(self.lengths[i] for n in shards for i in self.shards[n])

    def write(self, shard: int, states: Sequence[States]) -> None:
        """A shard is complete or absent: it is written under a temporary name and renamed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        hidden, best = torch.cat([s.hidden_TKH for s in states]), torch.cat([s.best_T for s in states])
        with replacing(self.path(shard)) as temporary:
            save_file({"hidden": hidden, "best": best}, temporary)

    def __getitem__(self, i: int) -> States:
        shard, start = self._where[i]
        end = start + self.lengths[i]
        with safe_open(self.path(shard), framework="pt") as file:
            return States(file.get_slice("hidden")[start:end], file.get_slice("best")[start:end])

    def read(self, indices: Sequence[int]) -> list[States]:
        """See ``FeatureSource``."""
        return [self[i] for i in indices]


def describe(folder: Path, record: dict) -> None:
    """Leave a note beside the shards of what made them."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "capture.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
