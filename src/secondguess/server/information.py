"""Routes that tell about the server and its model."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from secondguess.methods import SHAPE, Method
from secondguess.server.errors import ApiError
from secondguess.server.protocol import DetokenizeBody, TokenizeBody
from secondguess.server.service import Service
from secondguess.server.tokens import detokenized, tokenized

STARTED = int(time.time())
SILENCE_S = 120.0  # without a token where one is due; the longest prompt is read in less


def service_of(http: Request) -> Service:
    return http.app.state.service


Served = Annotated[Service, Depends(service_of)]
router = APIRouter(tags=["server"])


@router.get("/health")
async def health(service: Served) -> Response:
    """200 once the engine is warm, before which the port is closed; 503 when it has not moved for minutes."""
    if service.silent_s > SILENCE_S:
        raise ApiError(503, f"the engine has not moved for {service.silent_s:.0f} s", code="engine_stuck")
    return Response()


@router.get("/health_generate")
async def health_generate(service: Served) -> Response:
    """200 once the engine has generated a token: of what runs, else one of its own; 503 if that takes too long."""
    await service.probe()
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
        "internal_states": [{"avg_spec_accept_length": service.metrics.totals.drafting.acceptance_length}],
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: Served) -> JSONResponse:
    """The token ids of raw text, or of a conversation in the chat template."""
    service.check_model(body.model)
    ids, texts = await service.timely(tokenized, service.llm, body)
    return JSONResponse(
        {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids, "token_strs": texts}
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: Served) -> dict[str, str]:
    """The text of token ids."""
    service.check_model(body.model)
    return {"prompt": await service.timely(detokenized, service.llm, body.tokens)}


def shape(method: Method) -> dict[str, int]:
    """Of the trees that it drafts."""
    return {name: getattr(method.tree, name) for name in SHAPE if name in method.uses}


def model_card(service: Service) -> dict[str, Any]:
    about = {"id": service.name, "object": "model", "created": STARTED, "owned_by": "secondguess"}
    return about | {"max_model_len": service.llm.max_model_len}
