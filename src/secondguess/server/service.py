"""What the routes work with: the LLM, who is let in, and the answers on their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.server.errors import ApiError, of_failure, refusal
from secondguess.server.metrics import Metrics
from secondguess.server.protocol import AnyBody
from secondguess.server.settings import Settings
from secondguess.types import Delta, Output, Request, SamplingParams

RETRY_AFTER = {"retry-after": "1"}
WARM_UP = SamplingParams(max_tokens=8, ignore_eos=True)


class Service:
    """One LLM that is served."""

    def __init__(self, llm: LLM, name: str, settings: Settings) -> None:
        self.llm, self.name, self.settings = llm, settings.served_model_name or name, settings
        self.metrics = Metrics(llm, self.name)
        self.num_inside = 0  # requests that run or wait
        self.draining = False  # the process is about to end

    @property
    def room(self) -> int:
        """Requests that may be inside."""
        return self.llm.max_batch_size + self.settings.max_queue

    async def warm_up(self) -> None:
        """Let lazily made things be made before the first client pays for them."""
        async for _ in self.llm.agenerate([0], WARM_UP):
            pass

    @property
    def too_late(self) -> ApiError:
        return ApiError(504, f"the request took longer than {self.settings.request_timeout:g} s", code="timeout")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError when a client asks for another model."""
        if name not in (None, self.name):
            raise ApiError(404, f"no model {name!r}: this server has {self.name!r}", "model", "model_not_found")

    def check_count(self, num_answers: int) -> None:
        """Raises ApiError when there is never room for so many answers at once."""
        if num_answers > self.room:
            raise ApiError(400, f"{num_answers} answers at once, and this server has room for {self.room}", "n")

    async def read(self, work: Callable[[LLM, AnyBody], list[Request]], body: AnyBody) -> list[Request]:
        """The requests that ``work`` makes of a body, outside of the event loop: it tokenizes, and compiles grammars.

        Raises ApiError, also if that alone takes longer than a request may.
        """
        try:
            async with asyncio.timeout(self.settings.request_timeout):
                return await asyncio.to_thread(work, self.llm, body)
        except TimeoutError as error:
            raise self.too_late from error

    def start(self, requests: Sequence[Request], prompt_field: str = "prompt") -> Job:
        """Begin to answer. Raises ApiError if there is no room, or one of the requests cannot be decoded."""
        self.check_count(len(requests))
        if self.num_inside + len(requests) > self.room:
            self.metrics.count_rejected(len(requests))
            raise ApiError(429, "too many requests are waiting: try again later", None, "queue_full", RETRY_AFTER)
        try:
            streams = [self.llm.answer(request) for request in requests]
        except UserError as error:
            raise refusal(error, ("logit_bias", "stop_token_ids"), prompt_field) from error
        return Job(self, streams)


class Job:
    """The answers to one HTTP request, made whether or not anybody reads them, so that a slow reader holds no slot."""

    def __init__(self, service: Service, streams: Sequence[AsyncGenerator[Delta]]) -> None:
        self.service, self.streams = service, streams
        self.news: asyncio.Queue[tuple[int, Delta] | ApiError] = asyncio.Queue()
        service.num_inside += len(streams)
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._end)

    def cancel(self) -> None:
        """The requests end, and their slots are free within a cycle. Nothing happens to a job that is done."""
        self.task.cancel()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Which choice, and what it emitted, until all have ended. Raises ApiError if one of them fails."""
        left = len(self.streams)
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

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self.service.settings.request_timeout), asyncio.TaskGroup() as group:
                for i, stream in enumerate(self.streams):
                    group.create_task(self._read(i, stream))
        except TimeoutError:
            self.news.put_nowait(self.service.too_late)
        except BaseExceptionGroup as group_error:
            self.news.put_nowait(of_failure(group_error.exceptions[0]))

    def _end(self, _: asyncio.Task[None]) -> None:
        """Whoever still waits for news does so because the job was cancelled, perhaps before it began."""
        self.service.num_inside -= len(self.streams)
        self.news.put_nowait(ApiError(499, "the client left", code="cancelled"))

    async def _read(self, i: int, stream: AsyncGenerator[Delta]) -> None:
        clock = self.service.metrics.clock()
        try:
            async with aclosing(stream):
                async for delta in stream:
                    if delta.finish_reason == "abort":
                        raise RuntimeError("the engine dropped the request")
                    clock.hear(delta)
                    self.news.put_nowait((i, delta))
        except BaseException:
            self.service.metrics.count_finished("abort")
            raise
