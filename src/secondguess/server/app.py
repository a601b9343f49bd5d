"""The application: routes of the OpenAI API, of whoever looks after the server, and of the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from secondguess.server import generation, information, page
from secondguess.server.errors import add_handlers
from secondguess.server.limits import BodyLimit, KeyRequired
from secondguess.server.report import report_forever
from secondguess.server.service import Service


def make_app(service: Service) -> FastAPI:
    """An ASGI application. It answers once its lifespan has begun, which warms the engine up."""
    about = {"title": "secondguess", "version": version("secondguess"), "responses": ERRORS}
    # FastAPI's pages about the schema get their scripts from elsewhere; /openapi.json is ours.
    app = FastAPI(**about, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(generation.router)
    app.include_router(information.router)
    app.include_router(page.router)
    add_handlers(app)
    # The last one added is the first to see a request.
    settings = service.settings
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, timeout_s=settings.request_timeout)
    if settings.api_key:
        app.add_middleware(KeyRequired, key=settings.api_key)
    if settings.allow_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origin), allow_methods=["*"], allow_headers=["*"]
        )
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await service.warm_up()
    reporting = asyncio.create_task(report_forever(service.llm))
    try:
        yield
    finally:
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting


ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": ERROR_SCHEMA}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": _error("The request cannot be answered; `param` names the field to change. 429: try again later."),
    "5XX": _error("The request failed, or took too long."),
}
