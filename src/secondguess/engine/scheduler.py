"""Who is in the batch: requests join when a slot is free and leave when they end, between cycles.

Where the K/V of all texts have less room than the slots, the newest request is sent back to the queue when they fill it
(preempted, as vLLM says). Its K/V are dropped and made again when its turn comes; its text is the one that it would
have had, because a token depends on what is before it and on nothing else.

Texts that have ended stay in their slots as long as there is room, for newcomers that begin with the same tokens.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

from secondguess.engine.cycle import Batch, Engine, run_cycle
from secondguess.engine.prefill import Reading, begin, read_on, text_to_read
from secondguess.engine.reuse import FreeSlots, Text
from secondguess.engine.sampler_state import SamplerState, check_ids, end_ids, join, keep
from secondguess.engine.sequence import Sequence, TextStream
from secondguess.errors import UserError
from secondguess.types import Request, Totals

HEADROOM = 64  # tokens that each request has to grow by when one joins, or it would be sent back at once


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a scheduler is."""

    num_running: int
    num_waiting: int
    cache_used: float  # share of the room for K/V that holds tokens


class Scheduler:
    """First come, first served over the engine's slots."""

    def __init__(
        self, engine: Engine, max_len: int, tokenizer=None, room: int | None = None, reuse: bool = True
    ) -> None:
        """``max_len``: tokens of a request. ``room``: tokens of all texts, by default as many as the slots hold; one
        that runs alone has all the room that it needs. ``reuse``: whether texts take over what others begin with.
        """
        self.engine, self.max_len, self.tokenizer, self.room = engine, max_len, tokenizer, room
        self.waiting: deque[Sequence] = deque()
        self.resting: dict[Sequence, SamplerState] = {}  # of those that wait, those that were sent back
        self.free = FreeSlots(engine, reuse)
        self.batch: Batch | None = None
        self.reading: Reading | None = None  # the newcomer, before it joins the batch
        self.num_passes = 0  # over texts of newcomers, since the newest cycle
        self.checked: tuple[int, ...] | None = None  # the prompt found good last: often it has several answers
        self.totals = Totals()  # after the newest step; replaced and never changed, so any thread may read it

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.batch or self.reading)

    @property
    def load(self) -> Load:
        """May be asked for by any thread: a batch's list of requests never changes, there is a new batch instead."""
        batch, reading = self.batch, self.reading  # once: it may be another one a moment later
        running = batch.sequences if batch else []
        cache = self.engine.cache
        num_cached = sum(s.num_cached for s in running) + (reading.num_read if reading else 0)
        used = num_cached / (self.room or cache.num_slots * cache.num_columns)
        return Load(len(running) + bool(reading), len(self.waiting), used)

    def prepare(self, request: Request) -> Sequence:
        """The request as it will run; queues nothing. Raises UserError if it names a token outside the vocabulary, or
        if its prompt is empty or does not fit.
        """
        spec, params = self.engine.target.spec, request.params
        if request.prompt_ids is not self.checked:
            check_prompt(request.prompt_ids, self.max_len, spec.vocab_size)
            self.checked = request.prompt_ids
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
        sequence.submitted = sequence.queued = perf_counter()
        self.waiting.append(sequence)

    def step(self) -> None:
        """Read a piece of a newcomer's text if there is room for one, and those that run have not waited too long; else
        run a cycle, if there is anything to run.

        An error goes on to the caller, and ends the requests whose state it may have left half updated as "abort".
        """
        try:
            self._step()
        finally:
            self.totals = self.engine.totals.copy()

    def _step(self) -> None:
        if self._owes_a_cycle and self.batch:
            self._cycle(self.batch)
        elif self.reading:
            self._read_on(self.reading)
        elif self.waiting and self.free and self._has_room_for(self.waiting[0]):
            self._admit(self.waiting.popleft())
        elif self.batch:
            self._cycle(self.batch)
        if self.batch:
            end_lost(self.batch)
        self._retire()
        if self.room is not None:
            self.free.shrink(self.room - num_tokens(self._running))
        while self.batch and self._is_over_full(self.batch.sequences):
            self._send_back(max(self.batch.sequences, key=lambda s: s.submitted))

    def abort(self, sequence: Sequence) -> None:
        """Drop a request, queued or running; its slot is free at once. Does nothing to one that has ended."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.resting.pop(sequence, None)
        sequence.finish("abort")
        if self.reading and self.reading.sequence is sequence:
            self.reading = None
            self.free.release([sequence.slot])
        self._retire()

    @property
    def _running(self) -> list[Sequence]:
        """In slots, the newcomer included."""
        newcomer = [self.reading.sequence] if self.reading else []
        return [*(self.batch.sequences if self.batch else ()), *newcomer]

    @property
    def _owes_a_cycle(self) -> bool:
        """Whether those that run go first: long prompts, and requests that end with them, would else keep them waiting.

        A batch that only forms is filled at once; from then on there is a cycle after each pass over a newcomer's text.
        """
        if self.batch is None:
            return False
        forms = not any(s.drafting.cycles for s in self.batch.sequences)
        return self.num_passes >= (self.engine.cache.num_slots if forms else 1)

    def _admit(self, s: Sequence) -> None:
        s.timing.queue += perf_counter() - s.queued
        sampler, started = self.resting.pop(s, None), perf_counter()
        try:
            num_reused = self._place(s, text_to_read(s, sampler))
        except BaseException:
            s.finish("abort")
            raise
        s.timing.prefill += perf_counter() - started
        self.reading = begin(self.engine, s, sampler, num_reused)
        self._read_on(self.reading)

    def _place(self, s: Sequence, ids: list[int]) -> int:
        """Into a slot, which then holds so many of its tokens. All of a prompt is read where it is to be scored."""
        running, wish, prefix = self._running, s.request.speculation, None
        if s.request.params.prompt_logprobs is None:
            prefix = self.free.find(ids, wish, [text_of(other) for other in running])
        most = math.inf if self.room is None else self.room - num_tokens([*running, s])
        s.slot = self.free.take(ids, wish, prefix, most)
        return prefix.count if prefix else 0

    def _read_on(self, reading: Reading) -> None:
        self.num_passes += 1
        try:
            alone = read_on(self.engine, reading)
        except BaseException:
            self.reading = None
            self._give_back([reading.sequence])
            raise
        if alone:
            self.reading = None
            self.batch = joined(self.batch, alone) if self.batch else alone

    def _cycle(self, batch: Batch) -> None:
        self.num_passes = 0
        try:
            run_cycle(self.engine, batch)
        except BaseException:
            self.batch = None
            self._give_back(batch.sequences)
            raise

    def _has_room_for(self, newcomer: Sequence) -> bool:
        if self.room is None or self.batch is None:
            return True
        sequences = [*self.batch.sequences, newcomer]
        return num_tokens(sequences) + HEADROOM * len(sequences) <= self.room

    def _is_over_full(self, sequences: list[Sequence]) -> bool:
        return self.room is not None and len(sequences) > 1 and num_tokens(sequences) > self.room

    def _send_back(self, s: Sequence) -> None:
        """To the head of the queue, without its K/V."""
        assert self.batch is not None, "it runs"
        row = self.batch.sequences.index(s)
        self.resting[s] = keep(self.batch.sampler, [row])
        self._keep([r for r in range(len(self.batch.sequences)) if r != row])
        self.free.release([s.slot])
        s.queued = perf_counter()
        self.waiting.appendleft(s)
        self.engine.totals.num_preemptions += 1

    def _give_back(self, sequences: Seq[Sequence]) -> None:
        """End requests, and free their slots."""
        for s in sequences:
            s.finish("abort")
        self.free.release([s.slot for s in sequences])

    def _retire(self) -> None:
        """Free the slots of finished requests; their texts stay there."""
        if not self.batch or not any(s.finish_reason for s in self.batch.sequences):
            return
        sequences = self.batch.sequences
        self._keep([i for i, s in enumerate(sequences) if not s.finish_reason])
        self.free.keep(text_of(s) for s in sequences if s.finish_reason)

    def _keep(self, rows: list[int]) -> None:
        """Let only these requests of the batch go on in it."""
        batch = self.batch
        assert batch is not None, "there are rows"
        self.batch = Batch([batch.sequences[r] for r in rows], keep(batch.sampler, rows)) if rows else None


def check_prompt(ids: Seq[int], max_len: int, vocab_size: int) -> None:
    """Raises UserError if it is empty, too long, or has tokens outside the vocabulary."""
    if not ids:
        raise UserError("the prompt is empty: give it at least one token")
    if len(ids) >= max_len:
        raise UserError(f"the prompt has {len(ids)} tokens, but the context holds {max_len}: shorten it")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UserError(f"prompt token {outside} is outside the target's vocabulary of {vocab_size}")


def text_of(s: Sequence) -> Text:
    return Text(s.slot, s.token_ids, s.request.speculation)


def num_tokens(sequences: Seq[Sequence]) -> int:
    return sum(len(s.token_ids) for s in sequences)


def end_lost(batch: Batch) -> None:
    """End the requests that cannot follow their grammar any further."""
    for s, row in zip(batch.sequences, batch.sampler.rows, strict=True):
        if row.follower and row.follower.fault:
            s.fault = row.follower.fault
            s.finish("abort")


def joined(batch: Batch, newcomer: Batch) -> Batch:
    """In the order of slots: consecutive ones are read from the K/V cache without a copy."""
    sequences = [*batch.sequences, *newcomer.sequences]
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].slot)
    return Batch([sequences[i] for i in order], keep(join([batch.sampler, newcomer.sampler]), order))
