"""Sends a job's answers, whole or as server-sent events, and ends the job when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from secondguess.server.drafting import Drafts
from secondguess.server.errors import ApiError
from secondguess.server.protocol import Sampled, StreamOptions
from secondguess.server.service import Job
from secondguess.server.shape import Shape
from secondguess.types import Output

DONE = "data: [DONE]\n\n"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies pass every event on at once


async def reply(job: Job, shape: Shape, body: Sampled, http: HTTPRequest) -> Response:
    """The answer in the form that ``body`` asks for. Raises ApiError if a whole answer fails."""
    if body.stream:
        return EventStream(job, events(job, shape, body.stream_options or StreamOptions()))
    leaving = asyncio.create_task(end_when_left(job, http.receive))
    try:
        return JSONResponse(shape.whole(await job.outputs()))
    finally:
        leaving.cancel()
        job.cancel()


def check_stream_options(body: Sampled) -> None:
    """Raises ApiError when they are given and nothing is streamed."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")


async def events(job: Job, shape: Shape, options: StreamOptions) -> AsyncIterator[str]:
    outputs: dict[int, Output] = {}
    drafts = Drafts(shape) if options.drafting else None
    num_tokens = 0
    try:
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
    except ApiError as error:
        yield event(error.content)
    yield DONE


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def end_when_left(job: Job, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not job.service.draining:  # or else it is the server that wants to leave, once all have their answers
        job.cancel()


class EventStream(StreamingResponse):
    """Notices that the client has left also while there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, content: AsyncIterator[str]) -> None:
        super().__init__(content, headers=UNBUFFERED)
        self.job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(end_when_left(self.job, receive))
        try:
            with suppress(OSError):  # the connection broke
                await self.stream_response(send)
        finally:
            leaving.cancel()
            self.job.cancel()
