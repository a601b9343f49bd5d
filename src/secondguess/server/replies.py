"""Replies to requests for text, whole or as server-sent events: from a place in the queue to the last byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from typing import Any, Generic

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from secondguess.llm import LLM
from secondguess.server.drafting import Drafts
from secondguess.server.errors import ApiError, of_failure
from secondguess.server.limits import DEADLINE
from secondguess.server.protocol import AnyBody, Sampled, StreamOptions
from secondguess.server.service import Job, Service
from secondguess.server.shape import Shape
from secondguess.types import Output, Request

DONE = "data: [DONE]\n\n"
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}
LAST_WORDS_S = 1.0  # that a client gets to read why its stream ends


class Reply(Response, Generic[AnyBody]):
    """Owns its request: the places of its answers, its one deadline, and what happens when the client leaves."""

    def __init__(
        self,
        service: Service,
        body: AnyBody,
        num_answers: int,
        ask: Callable[[LLM, AnyBody], list[Request]],
        shape: Callable[[LLM, str, Sequence[Request], int], Shape],
        prompt_field: str,
    ) -> None:
        super().__init__()
        self.service, self.asked, self.num_answers = service, body, num_answers
        self.ask, self.shape, self.prompt_field = ask, shape, prompt_field
        self.begun = False  # whether the first byte is out, after which there is no other status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError if a whole answer fails, or a stream before it has begun."""
        try:
            field = "n" if self.asked.num_choices > 1 else self.prompt_field
            with closing(self.service.enter(self.num_answers, field)) as job:
                async with asyncio.timeout_at(scope[DEADLINE]) as deadline:
                    leaving = asyncio.create_task(end_when_left(receive, deadline))
                    try:
                        await self.answer(job, scope, receive, send)
                    finally:
                        leaving.cancel()
        except TimeoutError:  # is an OSError
            await self.fail(self.service.too_late, send)
        except OSError:
            pass  # the connection broke
        except ApiError as error:
            await self.fail(error, send)
        except Exception as error:
            await self.fail(of_failure(error), send)

    async def answer(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        requests = await self.service.read(self.ask, self.service.llm, self.asked)
        shape = self.shape(self.service.llm, self.service.name, requests, self.asked.num_choices)
        job.start(requests, self.prompt_field)
        if self.asked.stream:
            self.begun = True
            await self.stream(job, shape, send)
        else:
            whole = await self.service.read(shape.whole, await job.outputs())
            response = JSONResponse(whole)
            self.begun = True
            await response(scope, receive, send)

    async def stream(self, job: Job, shape: Shape, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in STREAM.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for text in events(job, shape, self.asked.stream_options or StreamOptions()):
            await send(part(text))
        await send(part(DONE, last=True))

    async def fail(self, error: ApiError, send: Send) -> None:
        if not self.begun:
            raise error
        with suppress(OSError):  # nobody reads
            async with asyncio.timeout(LAST_WORDS_S):
                if self.asked.stream:
                    await send(part(event(error.content) + DONE, last=True))


def check_stream_options(body: Sampled) -> None:
    """Raises ApiError when they are given and nothing is streamed."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")


async def events(job: Job, shape: Shape, options: StreamOptions) -> AsyncIterator[str]:
    outputs: dict[int, Output] = {}
    drafts = Drafts(shape) if options.drafting else None
    num_tokens = 0
    async for i, delta in job.deltas():
        num_tokens += len(delta.token_ids)
        more: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            more = {"usage": shape.usage(num_tokens)}
        if drafts:
            yield event(shape.drafting(drafts.of(i, delta)) | more)
        for piece in shape.pieces(i, delta):
            yield event(shape.part(piece) | more)
        if delta.output:
            outputs[i] = delta.output
    if options.include_usage:
        yield event(shape.last([outputs[i] for i in sorted(outputs)]))


def part(text: str, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": not last}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def end_when_left(receive: Receive, deadline: asyncio.Timeout) -> None:
    """For a client that has left it is too late whenever the answer comes."""
    while (await receive())["type"] != "http.disconnect":
        pass
    deadline.reschedule(asyncio.get_running_loop().time())
