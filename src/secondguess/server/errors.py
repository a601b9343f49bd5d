"""Every error as the OpenAI API's error object: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from secondguess.errors import UserError

log = logging.getLogger(__name__)

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
NAMES = {"variables": "chat_template_kwargs"}  # what the library calls otherwise


class ApiError(Exception):
    """An answer other than 200. ``param``: the field of the request that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def content(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, default)
        param = None if self.param is None else encodable(self.param)
        return {"error": {"message": encodable(str(self)), "type": kind, "param": param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, dict(self.headers or {}))


def encodable(text: str) -> str:
    """Halves of characters, which JSON may bring and UTF-8 does not have, as they are written in JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


def refusal(error: UserError, param: str | None = None) -> ApiError:
    """400. ``param``: the field to blame if the error names none."""
    field = error.field or param
    return ApiError(400, str(error), NAMES.get(field or "", field), "invalid_value")


def add_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return of_validation(error.errors()).response

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> JSONResponse:
        return of_failure(error).response


def of_failure(error: BaseException) -> ApiError:
    """500. Where it comes from goes into the log, and not to the client."""
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}", code="internal_error")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """400. An unknown field goes first: what else is wrong may be because of its name."""
    worst = next((error for error in errors if error["type"] == "unknown_field"), errors[0])
    if worst["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {worst['ctx']['error']}", code="invalid_json")
    unknown = worst["type"] == "unknown_field"
    param = ".".join([*map(str, worst["loc"][1:]), *([worst["ctx"]["name"]] if unknown else [])]) or None
    where = f"{param}: " if param and not unknown else ""
    return ApiError(400, where + worst["msg"], param, worst["type"])
