"""What is refused before anything looks at it: clients without the key, and bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import hmac
import re

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from secondguess.server.errors import ApiError

DEADLINE = "secondguess.deadline"  # in a scope: by the event loop's clock
OPEN = re.compile("/(health|page/.*)?")  # whoever watches the process needs no key; the page asks for it


class KeyRequired:
    """Lets requests with ``Authorization: Bearer KEY`` pass. How long the comparison takes tells nothing of the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not OPEN.fullmatch(scope["path"]) and not self.is_known(Headers(scope=scope)):
            wanted = "missing or wrong API key: send it as 'Authorization: Bearer KEY'"
            error = ApiError(401, wanted, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await error.response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key)


class BodyLimit:
    """Stops reading a body at ``limit`` bytes, whatever its headers said, and answers 413; after a while 408.

    ``scope[DEADLINE]`` tells by when the request has to be answered.
    """

    def __init__(self, app: ASGIApp, limit: int, timeout_s: float) -> None:
        self.app, self.limit, self.timeout_s = app, limit, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, incomplete = 0, True
        deadline = scope[DEADLINE] = asyncio.get_running_loop().time() + self.timeout_s

        async def counted() -> Message:
            nonlocal size, incomplete
            try:
                async with asyncio.timeout_at(deadline if incomplete else None):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body took longer than {self.timeout_s:g} s: send it faster") from error
            size, incomplete = size + len(message.get("body", b"")), message.get("more_body", False)
            if size > self.limit:
                raise HTTPException(413, f"the body has more than {self.limit} bytes: send less")
            return message

        await self.app(scope, counted, send)
