"""Routes that tell about the server and its model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from secondguess.methods import SHAPE, Method
from secondguess.server.asks import tokenized
from secondguess.server.errors import ApiError
from secondguess.server.protocol import DetokenizeBody, TokenizeBody
from secondguess.server.service import Service
from secondguess.types import Request as Ask
from secondguess.types import SamplingParams

STARTED = int(time.time())


def service_of(http: Request) -> Service:
    return http.app.state.service


Served = Annotated[Service, Depends(service_of)]
router = APIRouter(tags=["server"])


@router.get("/health")
async def health() -> Response:
    """200 once the engine is warm; before that the port is closed."""
    return Response()


@router.get("/health_generate")
async def health_generate(service: Served) -> Response:
    """200 once a token has been generated, through the queue like any other."""
    await service.start([Ask((0,), SamplingParams(max_tokens=1))]).outputs()
    return Response()


@router.get("/version")
async def show_version() -> dict[str, str]:
    return {"version": version("secondguess")}


@router.get("/metrics")
async def show_metrics(service: Served) -> Response:
    """For Prometheus."""
    return Response(service.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> dict[str, Any]:
    service.check_model(name)
    return model_card(service)


@router.get("/server_info")
async def server_info(service: Served) -> dict[str, Any]:
    """What is served and how; ``internal_states`` is where tools made for SGLang look for tau."""
    llm = service.llm
    return {
        "version": version("secondguess"),
        "model": service.name,
        "fingerprint": llm.target.fingerprint,
        "method": llm.method.typed,
        "methods": {name: shape(method) for name, method in llm.methods.items()},
        "switched_off": llm.switched_off,
        "paused": llm.paused,
        "max_model_len": llm.max_model_len,
        "max_batch_size": llm.max_batch_size,
        "kv_cache_tokens": llm.kv_cache_tokens,
        "max_queue": service.settings.max_queue,
        "load": asdict(llm.load),
        "internal_states": [{"avg_spec_accept_length": llm.totals.drafting.acceptance_length}],
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: Served) -> JSONResponse:
    """The token ids of raw text, or of a conversation in the chat template."""
    service.check_model(body.model)
    ids = await asyncio.to_thread(tokenized, service.llm, body)
    texts = [service.llm.decode([token]) for token in ids] if body.return_token_strs else None
    return JSONResponse(
        {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids, "token_strs": texts}
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: Served) -> dict[str, str]:
    """The text of token ids."""
    service.check_model(body.model)
    size = service.llm.target.spec.vocab_size
    if any(token >= size for token in body.tokens):
        raise ApiError(400, f"a token is outside the vocabulary of {size}", "tokens", "invalid_value")
    return {"prompt": service.llm.decode(body.tokens)}


def shape(method: Method) -> dict[str, int]:
    """Of the trees that it drafts."""
    return {name: getattr(method.tree, name) for name in SHAPE if name in method.uses}


def model_card(service: Service) -> dict[str, Any]:
    about = {"id": service.name, "object": "model", "created": STARTED, "owned_by": "secondguess"}
    return about | {"max_model_len": service.llm.max_model_len}
