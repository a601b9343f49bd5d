"""Who is in the batch: requests join when a slot is free and leave when they end, between cycles."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from time import perf_counter

from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.prefill import prefill
from secondguess.engine.sampler_state import check_ids, end_ids, join, keep
from secondguess.engine.sequence import Sequence, TextStream
from secondguess.errors import UserError
from secondguess.types import Request


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a scheduler is."""

    num_running: int
    num_waiting: int
    cache_used: float  # share of the K/V cache's columns that hold tokens


class Scheduler:
    """First come, first served over the engine's slots."""

    def __init__(self, engine: Engine, max_len: int, tokenizer=None) -> None:
        self.engine, self.max_len, self.tokenizer = engine, max_len, tokenizer
        self.waiting: deque[Sequence] = deque()
        self.free = list(range(engine.cache.num_slots))  # a heap: the lowest slot comes first
        self.batch: Batch | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.batch)

    @property
    def load(self) -> Load:
        """May be asked for by any thread: a batch's list of requests never changes, there is a new batch instead."""
        batch = self.batch  # once: it may be another one a moment later
        running = batch.sequences if batch else []
        cache = self.engine.cache
        used = sum(s.num_cached for s in running) / (cache.num_slots * cache.num_columns)
        return Load(len(running), len(self.waiting), used)

    def prepare(self, request: Request) -> Sequence:
        """The request as it will run; queues nothing. Raises UserError if it names a token outside the vocabulary, or
        if its prompt is empty or does not fit.
        """
        spec, params = self.engine.target.spec, request.params
        if not request.prompt_ids:
            raise UserError("the prompt is empty: give it at least one token")
        if len(request.prompt_ids) >= self.max_len:
            length = len(request.prompt_ids)
            raise UserError(f"the prompt has {length} tokens, but the context holds {self.max_len}: shorten it")
        outside = next((t for t in request.prompt_ids if not 0 <= t < spec.vocab_size), None)
        if outside is not None:
            raise UserError(f"prompt token {outside} is outside the target's vocabulary of {spec.vocab_size}")
        check_ids(params, spec.vocab_size)
        return Sequence(
            request=request,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            slot=-1,
            end_ids=frozenset(end_ids(params, spec.eos_token_ids)),
            max_len=self.max_len,
            stream=TextStream(self.tokenizer),
            token_ids=list(request.prompt_ids),
        )

    def submit(self, sequence: Sequence) -> None:
        """Queue a prepared request."""
        sequence.submitted = perf_counter()
        self.waiting.append(sequence)

    def step(self) -> None:
        """Prefill one waiting request if a slot is free, else run a cycle, if there is anything to run.

        An error goes on to the caller, and ends the requests whose state it may have left half updated as "abort".
        """
        if self.waiting and self.free:
            self._admit(self.waiting.popleft())
        elif self.batch:
            self._cycle(self.batch)
        if self.batch:
            end_lost(self.batch)
        self._retire()

    def abort(self, sequence: Sequence) -> None:
        """Drop a request, queued or running; its slot is free at once. Does nothing to one that has ended."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.finish("abort")
        self._retire()

    def _admit(self, s: Sequence) -> None:
        s.slot = heappop(self.free)
        s.timing.queue = perf_counter() - s.submitted
        try:
            alone = prefill(self.engine, s)
        except BaseException:
            self._give_back(s)
            raise
        self.batch = joined(self.batch, alone) if self.batch else alone

    def _cycle(self, batch: Batch) -> None:
        try:
            run_cycle(self.engine, batch)
        except BaseException:
            self.batch = None
            for s in batch.sequences:
                self._give_back(s)
            raise

    def _give_back(self, s: Sequence) -> None:
        """Free the slot of a request that runs no more."""
        s.finish("abort")
        self.engine.speculator.release(s.slot)
        heappush(self.free, s.slot)

    def _retire(self) -> None:
        """Free the slots of finished requests."""
        if not self.batch or not any(s.finish_reason for s in self.batch.sequences):
            return
        stay = [i for i, s in enumerate(self.batch.sequences) if not s.finish_reason]
        for s in self.batch.sequences:
            if s.finish_reason:
                self._give_back(s)
        if stay:
            self.batch = Batch([self.batch.sequences[i] for i in stay], keep(self.batch.sampler, stay))
        else:
            self.batch = None


def end_lost(batch: Batch) -> None:
    """End the requests whose text has left its grammar."""
    for s, row in zip(batch.sequences, batch.sampler.rows, strict=True):
        if row.follower and row.follower.failed:
            s.finish("abort")


def joined(batch: Batch, newcomer: Batch) -> Batch:
    """In the order of slots: consecutive ones are read from the K/V cache without a copy."""
    sequences = [*batch.sequences, *newcomer.sequences]
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].slot)
    return Batch([sequences[i] for i in order], keep(join([batch.sampler, newcomer.sampler]), order))
