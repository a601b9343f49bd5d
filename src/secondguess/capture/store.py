"""Target states on disk, as safetensors shards.

Per token: the tapped layers and the last hidden state (bfloat16), and the target's most likely next token (int32).
A shard's header says whose they are: of each sequence a digest of its token ids, where it begins and how long it is. So
states are found by content: of data that has grown only the new sequences are made, and a shard may have any size.

T tokens of a sequence, L tapped layers, K = L + 1 states, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from secondguess import digests
from secondguess.atomic import replacing
from secondguess.errors import UserError

SHARD_TOKENS = 1 << 16  # of a new shard, about
FORMER_SHARD_TOKENS = 1 << 16


def folder_name(target_fingerprint: str, tap_layers: tuple[int, ...] | None = None) -> str:
    """What states depend on, beside token ids: the target's weights, and which layers are tapped."""
    return hashlib.sha256(f"states of {target_fingerprint} at {tap_layers}".encode()).hexdigest()[:16]


def former_name(
    target_fingerprint: str, sequences: Sequence[Sequence[int]], tap_layers: tuple[int, ...] | None = None
) -> str:
    """Of a folder of the form before, which had a folder for each list of sequences."""
    digest = hashlib.sha256(target_fingerprint.encode())
    if tap_layers is not None:
        digest.update(repr(tap_layers).encode())
    for ids in sequences:
        digest.update(torch.tensor(ids, dtype=torch.int32).numpy().tobytes())
    return digest.hexdigest()[:16]


def plan_shards(lengths: Sequence[int], num_tokens: int) -> list[range]:
    """Consecutive sequences with that many tokens or a few more; the last ones may have fewer."""
    shards, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        tokens += length
        if tokens >= num_tokens or i == len(lengths) - 1:
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


class Place(NamedTuple):
    """Of the states of one sequence."""

    path: Path
    start: int
    length: int


class StateStore:
    """States of a list of sequences, there or not yet; ``store[i]`` reads those of sequence i."""

    batch_tokens = None  # see ``FeatureSource``

    def __init__(
        self,
        folder: Path,
        sequences: Sequence[Sequence[int]],
        tap_layers: tuple[int, ...] | None = None,
        former: Path | None = None,
    ) -> None:
        """``tap_layers``: see ``FeatureSource``. ``former``: a folder of the form before, see ``former_places``."""
        self.folder, self.tap_layers = folder, tap_layers
        self.lengths = [len(ids) for ids in sequences]
        self._keys = [digests.of_tokens(ids) for ids in sequences]
        self._read: set[Path] = set()
        self._places = former_places(former, self._keys, self.lengths) if former else {}

    @property
    def missing(self) -> list[list[int]]:
        """The sequences whose states are not there, each once, in shards."""
        self._look()
        firsts = {key: i for i, key in reversed([*enumerate(self._keys)]) if key not in self._places}
        indices = sorted(firsts.values())
        lengths = [self.lengths[i] for i in indices]
        return [[indices[n] for n in shard] for shard in plan_shards(lengths, SHARD_TOKENS)]

    @property
    def shards(self) -> list[Path]:
        """The files that hold what is there."""
        self._look()
        return sorted({self._places[key].path for key in self._keys if key in self._places})

    def tokens(self, shards: Iterable[Iterable[int]]) -> int:
        return sum(self.lengths[i] for shard in shards for i in shard)

    def write(self, indices: Sequence[int], states: Sequence[States]) -> None:
        """A shard is complete or absent: it is written under a temporary name and renamed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        hidden, best = torch.cat([s.hidden_TKH for s in states]), torch.cat([s.best_T for s in states])
        keys, lengths = [self._keys[i] for i in indices], [self.lengths[i] for i in indices]
        index = [(key, sum(lengths[:n]), length) for n, (key, length) in enumerate(zip(keys, lengths, strict=True))]
        name = hashlib.sha256("".join(keys).encode()).hexdigest()[:16]
        with replacing(self.folder / f"states-{name}.safetensors") as temporary:
            save_file({"hidden": hidden, "best": best}, temporary, {"sequences": json.dumps(index)})

    def __getitem__(self, i: int) -> States:
        key = self._keys[i]
        if key not in self._places:
            self._look()  # somebody else made it meanwhile
        path, start, length = self._places[key]
        with safe_open(path, framework="pt") as file:
            here = slice(start, start + length)
            return States(file.get_slice("hidden")[here], file.get_slice("best")[here])

    def read(self, indices: Sequence[int]) -> list[States]:
        """See ``FeatureSource``."""
        return [self[i] for i in indices]

    def _look(self) -> None:
        """Take in the shards that have come since."""
        for path in sorted({*self.folder.glob("states-*.safetensors")} - self._read):
            self._places |= places_in(path)
            self._read.add(path)


def places_in(path: Path) -> dict[str, Place]:
    """By digest. Raises UserError if it is no shard."""
    try:
        with safe_open(path, framework="pt") as file:
            index = json.loads(file.metadata()["sequences"])
            return {key: Place(path, start, length) for key, start, length in index}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r}): remove it, and its states are made again") from error


def former_places(folder: Path, keys: Sequence[str], lengths: Sequence[int]) -> dict[str, Place]:
    """In shards of the form before. They say nothing of what is in them: their folder is of exactly these sequences, in
    order, and a number of tokens that never changed says which are in which.
    """
    places: dict[str, Place] = {}
    for number, shard in enumerate(plan_shards(lengths, FORMER_SHARD_TOKENS)):
        path, start = folder / f"states-{number:05d}.safetensors", 0
        for i in shard if path.is_file() else ():
            places[keys[i]] = Place(path, start, lengths[i])
            start += lengths[i]
    return places


def describe(folder: Path, record: dict) -> None:
    """Leave a note beside the shards of what made them."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "capture.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
