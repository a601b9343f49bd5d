"""Routes that generate text."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from secondguess.server.asks import as_prompts, chat_requests, completion_requests
from secondguess.server.protocol import ChatBody, CompletionBody
from secondguess.server.replies import Reply, check_stream_options
from secondguess.server.service import Service
from secondguess.server.shape import ChatShape, CompletionShape

router = APIRouter(tags=["OpenAI API"])


@router.post("/v1/chat/completions", response_class=Response)
async def chat_completions(body: ChatBody, http: Request) -> Response:
    """Continue a conversation."""
    return Reply(checked(http, body), body, body.num_choices, chat_requests, ChatShape, "messages")


@router.post("/v1/completions", response_class=Response)
async def completions(body: CompletionBody, http: Request) -> Response:
    """Continue raw text or token ids."""
    service, shape = checked(http, body), partial(CompletionShape, echo=bool(body.echo))
    num_answers = len(as_prompts(body.prompt)) * body.num_choices
    return Reply(service, body, num_answers, completion_requests, shape, "prompt")


def checked(http: Request, body: ChatBody | CompletionBody) -> Service:
    """Raises ApiError when the request is for another model, or has options of streaming and does not stream."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    check_stream_options(body)
    return service
