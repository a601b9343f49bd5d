"""A target larger than one device: transformers' tensor parallelism over the processes that torchrun started.

Each process holds a part of every layer, and the K/V of its heads. Only the first has an engine, a drafter, noise and
clients: it tells the others which pass comes next. So trees and tokens are chosen once, and whatever works in one
process (a server, ``budget="auto"``) works in several.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig

from secondguess.engine.slots import SlotCache
from secondguess.errors import require
from secondguess.target.hf import HFTarget
from secondguess.target.load import WHOLE, blamed_on, find_files, load_target, read
from secondguess.target.pretrained import read_config
from secondguess.types import Rows, TargetOut

CPU = torch.device("cpu")
PATIENCE = timedelta(days=365)  # the others wait while the first has nothing to do
NO_CACHE = -1
Work = Literal["new_cache", "release", "copy", "compact", "forward", "logits"]

log = logging.getLogger(__name__)


def is_launched() -> bool:
    """Whether torchrun started several processes, of which this is one."""
    return dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def is_follower() -> bool:
    """Whether this process only does what the first one says."""
    return is_launched() and int(os.environ["RANK"]) > 0


@dataclass(frozen=True, slots=True)
class Call:
    """What every process does next. Tensors are on the CPU; caches that were ``dropped`` are needed no more."""

    work: Work
    cache: int
    arguments: tuple[Any, ...]
    dropped: tuple[int, ...]


class Line:
    """The first process's line to the others: a group of its own, whose threads end with it.

    A thread of gloo's needs Python to let go of a tensor that it has sent. One that is still at it when Python is on
    its way out aborts the process. (The default group lives on in the model; its last sums are long over by then.)
    """

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, said: bytes | None) -> None:
        dist.broadcast_object_list([said], src=0, device=CPU, group=self.group)

    def hear(self) -> bytes | None:
        """What the first process said; None when it ends."""
        box: list[bytes | None] = [None]
        dist.broadcast_object_list(box, src=0, device=CPU, group=self.group)
        return box[0]

    def close(self) -> None:
        dist.destroy_process_group(self.group)
        del self.group  # the last reference: its threads are waited for
        dist.destroy_process_group()

    def end(self) -> None:
        """The first process ends, and the others with it."""
        try:
            self.send(None)
        except RuntimeError:
            log.warning("the other processes have ended before the first")
        finally:
            self.close()


class Leader(HFTarget):
    """The first process's part of a target, and its word to the others."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, line: Line) -> None:
        super().__init__(model, tokenizer)
        self.line = line
        self._num_caches = 0
        self._dropped: list[int] = []
        atexit.register(line.end)

    def new_cache(self, num_slots: int, num_columns: int) -> SlotCache:
        """The first process's part; the others hold theirs under the same number."""
        number, self._num_caches = self._num_caches, self._num_caches + 1
        with self.all_do("new_cache", number, num_slots, num_columns):
            cache = LeaderCache(self, number, num_slots, num_columns)
        weakref.finalize(cache, self._dropped.append, number)
        return cache

    def forward(self, rows: Rows, cache: SlotCache, last_only: bool = False) -> TargetOut:
        assert isinstance(cache, LeaderCache)
        with self.all_do("forward", cache.number, rows, last_only):
            return super().forward(rows, cache, last_only)

    @torch.no_grad()  # as in the others: with gradients transformers sends other messages
    def logits(self, hidden_RNH: Tensor) -> Tensor:
        with self.all_do("logits", NO_CACHE, hidden_RNH):
            return super().logits(hidden_RNH)

    @contextmanager
    def all_do(self, work: Work, cache: int, *arguments: Any) -> Generator[None]:
        """The others do their part while this process does its own.

        An error before they are told anything is an ordinary one: they still wait for the next pass.
        """
        call = Call(work, cache, tuple(moved(a, CPU) for a in arguments), tuple(self._dropped))
        said = pickle.dumps(call)
        with in_step():
            self.line.send(said)
            del self._dropped[: len(call.dropped)]
            yield


class LeaderCache(SlotCache):
    """Whatever changes it outside a pass, changes all processes' parts at once."""

    def __init__(self, leader: Leader, number: int, num_slots: int, num_columns: int) -> None:
        spec = leader.spec
        super().__init__(num_slots, num_columns, spec.layer_shapes, spec.dtype, spec.device)
        self.leader, self.number = leader, number

    def release(self, slot: int) -> None:
        with self.leader.all_do("release", self.number, slot):
            super().release(slot)

    def copy(self, source: int, goal: int, count: int) -> None:
        with self.leader.all_do("copy", self.number, source, goal, count):
            super().copy(source, goal, count)

    def compact(self, slots_R: Tensor, source_RN: Tensor, start_R: Tensor, count_R: Tensor) -> None:
        with self.leader.all_do("compact", self.number, slots_R, source_RN, start_R, count_R):
            super().compact(slots_R, source_RN, start_R, count_R)


class Follower:
    """Another process's part of a target, and of its caches."""

    def __init__(self, target: HFTarget) -> None:
        self.target = target
        self.caches: dict[int, SlotCache] = {}

    def do(self, said: bytes) -> None:
        """A ``Call`` of the first process's."""
        call: Call = pickle.loads(said)
        for number in call.dropped:
            del self.caches[number]
        WORKS[call.work](self, call.cache, *(moved(a, self.target.spec.device) for a in call.arguments))

    def new_cache(self, cache: int, num_slots: int, num_columns: int) -> None:
        self.caches[cache] = self.target.new_cache(num_slots, num_columns)

    def release(self, cache: int, slot: int) -> None:
        self.caches[cache].release(slot)

    def copy(self, cache: int, source: int, goal: int, count: int) -> None:
        self.caches[cache].copy(source, goal, count)

    def compact(self, cache: int, *where: Tensor) -> None:
        self.caches[cache].compact(*where)

    def forward(self, cache: int, rows: Rows, last_only: bool) -> None:
        self.target.forward(rows, self.caches[cache], last_only)

    def logits(self, cache: int, hidden_RNH: Tensor) -> None:
        self.target.logits(hidden_RNH)


WORKS: dict[Work, Callable[..., None]] = {
    "new_cache": Follower.new_cache,
    "release": Follower.release,
    "copy": Follower.copy,
    "compact": Follower.compact,
    "forward": Follower.forward,
    "logits": Follower.logits,
}


@torch.no_grad()
def follow(target: HFTarget, line: Line) -> None:
    """Do what the first process does, until it ends."""
    follower = Follower(target)
    try:
        while (said := line.hear()) is not None:
            with in_step():
                follower.do(said)
    finally:
        line.close()


@contextmanager
def in_step() -> Generator[None]:
    """Whatever goes wrong in here ends the process, and torchrun the others: they wait for sums that never come."""
    try:
        yield
    except BaseException:
        log.critical("this process cannot go on in step with the others, and ends", exc_info=True)
        os._exit(1)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors and rows, to ``device``; anything else as it is."""
    if isinstance(value, Rows):
        return Rows(**{field.name: moved(getattr(value, field.name), device) for field in fields(Rows)})
    return value.to(device) if isinstance(value, Tensor) else value


def load_spread(
    name: str,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    say: Callable[[str], None] | None = None,
) -> HFTarget:
    """As ``load_target``, over all processes that torchrun started on this machine; alone it is ``load_target``.

    Only the first process returns. The others follow it and end when it does (SystemExit). Raises UserError as well if
    the target's heads cannot be shared out, or its form is for one process.
    """
    if not is_launched():
        return load_target(name, dtype, device, trust_remote_code, say)
    require(dtype in WHOLE, f"dtype {dtype!r} is for one process: leave torchrun out")
    count, line = start(device), Line()
    files = find_files(name, trust_remote_code, say or log.info)
    with blamed_on(name):
        check_shares(read_config(files)[0], count)
        model, tokenizer = read(files, WHOLE[dtype], distributed_config=DistributedConfig(tp_size=count))
        if not is_follower():
            return Leader(model, tokenizer, line)
        follower = HFTarget(model, tokenizer)
    follow(follower, line)
    raise SystemExit(0)


def start(device: str) -> int:
    """Connect the processes; how many they are. Raises UserError if transformers would take another device."""
    there = (torch.accelerator.current_accelerator() or CPU).type
    require(device == there, f"device must be {there} here, where several processes share a target, got {device!r}")
    if not dist.is_initialized():
        dist.init_process_group("gloo" if there == "cpu" else "cpu:gloo,cuda:nccl", timeout=PATIENCE)
    return dist.get_world_size()


def check_shares(config: PreTrainedConfig, count: int) -> None:
    """Raises UserError if ``count`` processes cannot have the same number of heads each."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shared = f"{count} processes cannot share {heads} attention heads and {kv_heads} K/V heads"
    require(heads % count == 0 and kv_heads % count == 0, f"{shared}: start as many as divide both numbers")
