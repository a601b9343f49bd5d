"""What the routes work with: the LLM, who is let in, and the answers on their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter
from typing import ParamSpec, TypeVar

from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.server.errors import ApiError, of_failure, refusal
from secondguess.server.metrics import Clock, Metrics
from secondguess.server.settings import Settings
from secondguess.types import Delta, Output, Request, SamplingParams, Speculation

RETRY_AFTER = {"retry-after": "1"}
WARM_UP = SamplingParams(max_tokens=8, ignore_eos=True)
PROBE = Request((0,), SamplingParams(max_tokens=1), counted=False)
PROBE_S = 10.0  # in which an engine that is well has generated some token
NUM_READERS = 2  # threads that tokenize, compile grammars and write answers, beside the engine's

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """One LLM that is served."""

    def __init__(self, llm: LLM, name: str, settings: Settings) -> None:
        self.llm, self.name, self.settings = llm, settings.served_model_name or name, settings
        self.metrics = Metrics(llm, self.name)
        self.readers = ThreadPoolExecutor(NUM_READERS, "secondguess-reader")
        self.jobs: set[Job] = set()
        self.num_texts = 0  # that are tokenized, or put together, and no more
        self.probing: asyncio.Task[None] | None = None
        self.last_news = 0.0  # when the engine last told any

    @property
    def room(self) -> int:
        """Answers that may be inside at once."""
        return self.llm.max_batch_size + self.settings.max_queue

    @property
    def num_inside(self) -> int:
        """Answers that have a place: from the arrival of the request to the last byte of the reply."""
        return sum(job.num_answers for job in self.jobs)

    @property
    def silent_s(self) -> float:
        """For how many seconds the engine has told no news while there were answers to make."""
        starts = [job.begun for job in self.jobs if not all(clock.ended for clock in job.clocks)]
        return perf_counter() - max(min(starts), self.last_news) if starts else 0.0

    async def warm_up(self) -> None:
        """Let lazily made things be made before the first client pays for them, for every method. None of it counts."""
        wishes = [Speculation(name) for name in self.llm.methods] if len(self.llm.methods) > 1 else [Speculation()]
        for wish in wishes:
            async for _ in self.llm.answer(Request((0,), WARM_UP, speculation=wish)):
                pass
        await self.read(warm_grammars, self.llm)
        self.metrics.begin()

    @property
    def too_late(self) -> ApiError:
        return ApiError(504, f"the request took longer than {self.settings.request_timeout:g} s", code="timeout")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError when a client asks for another model."""
        if name not in (None, self.name):
            raise ApiError(404, f"no model {name!r}: this server has {self.name!r}", "model", "model_not_found")

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``work``, outside of the event loop: it tokenizes, compiles grammars, or writes an answer."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, lambda: work(*args, **kwargs))

    async def timely(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As ``read``, for requests without answers. Raises ApiError if it takes longer than a request may, or if there
        are as many of them already as there may be answers.
        """
        if self.num_texts >= self.room:
            raise self.refused(1)
        self.num_texts += 1
        try:
            async with asyncio.timeout(self.settings.request_timeout):
                return await self.read(work, *args, **kwargs)
        except TimeoutError as error:
            raise self.too_late from error
        finally:
            self.num_texts -= 1

    def enter(self, num_answers: int, field: str) -> Job:
        """A place for each answer to a request, before anything is done for it. Raises ApiError if there is no room;
        that there never is any is the fault of ``field``.
        """
        if num_answers > self.room:
            raise ApiError(400, f"{num_answers} answers at once, and this server has room for {self.room}", field)
        if self.num_inside + num_answers > self.room:
            raise self.refused(num_answers)
        return Job(self, num_answers)

    def refused(self, num_answers: int) -> ApiError:
        self.metrics.count_rejected(num_answers)
        return ApiError(429, "too many requests are waiting: try again later", None, "queue_full", RETRY_AFTER)

    async def probe(self) -> None:
        """Return when the engine has emitted a token, for whomever. Raises ApiError if it does not.

        A full queue is no reason to fail, so the probe takes no place; and there is one at a time for all who ask.
        """
        if self.probing is None or self.probing.done():
            self.probing = asyncio.create_task(self._probe())
        await asyncio.shield(self.probing)

    async def _probe(self) -> None:
        before, heard = self.llm.totals.num_tokens, list[Delta | Exception]()
        drop = self.llm.start([PROBE], lambda _, news: heard.append(news))
        try:
            async with asyncio.timeout(PROBE_S):
                while not heard and self.llm.totals.num_tokens == before:
                    await asyncio.sleep(0.005)
        except TimeoutError as error:
            raise ApiError(503, f"the engine has emitted no token in {PROBE_S:g} s", code="engine_stuck") from error
        finally:
            drop()
        if heard and isinstance(heard[0], Exception):
            raise of_failure(heard[0])


class Job:
    """What one HTTP request has of the service: its places, and the answers on their way.

    They are made whether or not anybody reads them, so that a slow reader holds no slot of the engine.
    """

    def __init__(self, service: Service, num_answers: int) -> None:
        self.service, self.num_answers = service, num_answers
        self.arrived, self.begun = perf_counter(), 0.0
        self.news: asyncio.Queue[tuple[int, Delta] | ApiError] = asyncio.Queue()
        self.clocks: list[Clock] = []  # of the answers that have been begun
        self._drop: Callable[[], None] | None = None
        service.jobs.add(self)

    def start(self, requests: Sequence[Request], prompt_field: str) -> None:
        """Begin to answer. Raises ApiError if one of the requests cannot be decoded."""
        loop = asyncio.get_running_loop()

        def tell(i: int, news: Delta | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
                loop.call_soon_threadsafe(self._hear, i, news)

        try:
            self._drop = self.service.llm.start(requests, tell)
        except UserError as error:
            raise refusal(error, prompt_field) from error
        self.begun = perf_counter()
        self.clocks = [self.service.metrics.clock(self.arrived) for _ in requests]

    def close(self) -> None:
        """What still runs ends, its slots are free within a cycle, and the places are free at once."""
        self.service.jobs.remove(self)
        if self._drop:
            self._drop()
        for clock in self.clocks:
            clock.give_up("abort")

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Which choice, and what it emitted, until all have ended. Raises ApiError if one of them fails."""
        left = self.num_answers
        while left:
            news = await self.news.get()
            if isinstance(news, ApiError):
                raise news
            yield news
            left -= news[1].output is not None

    async def outputs(self) -> list[Output]:
        """All answers, in the order of the requests. Raises ApiError if one of them fails."""
        found = {i: delta.output async for i, delta in self.deltas() if delta.output}
        return [found[i] for i in range(len(found))]

    def _hear(self, i: int, news: Delta | Exception) -> None:
        self.service.last_news = perf_counter()
        if self not in self.service.jobs:  # it came late
            return
        if isinstance(news, Exception):
            self.clocks[i].give_up("error")
            self.news.put_nowait(refusal(news) if isinstance(news, UserError) else of_failure(news))
        else:
            self.clocks[i].hear(news)
            self.news.put_nowait((i, news))


def warm_grammars(llm: LLM) -> None:
    with suppress(UserError):  # there are none for this target, or in this installation
        llm.grammars.json()
