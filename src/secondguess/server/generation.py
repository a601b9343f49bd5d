"""Routes that generate text."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from secondguess.server.asks import as_prompts, chat_requests, completion_requests
from secondguess.server.protocol import ChatBody, CompletionBody
from secondguess.server.replies import check_stream_options, reply
from secondguess.server.service import Service
from secondguess.server.shape import ChatShape, CompletionShape

router = APIRouter(tags=["OpenAI API"])


@router.post("/v1/chat/completions", response_class=Response)
async def chat_completions(body: ChatBody, http: Request) -> Response:
    """Continue a conversation."""
    service = checked(http, body)
    requests = await service.read(chat_requests, body)
    shape = ChatShape(service.llm, service.name, requests)
    return await reply(service.start(requests, "messages"), shape, body, http)


@router.post("/v1/completions", response_class=Response)
async def completions(body: CompletionBody, http: Request) -> Response:
    """Continue raw text or token ids."""
    service = checked(http, body)
    service.check_count(len(as_prompts(body.prompt)) * body.num_choices)  # before any of them is tokenized
    requests = await service.read(completion_requests, body)
    shape = CompletionShape(service.llm, service.name, requests, echo=bool(body.echo))
    return await reply(service.start(requests), shape, body, http)


def checked(http: Request, body: ChatBody | CompletionBody) -> Service:
    """Raises ApiError when the request is for another model, or has options of streaming and does not stream."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    check_stream_options(body)
    return service
