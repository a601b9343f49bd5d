"""What is refused before anything looks at it: clients without the key, and bodies that are too large."""

from __future__ import annotations

import hmac
import re

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from secondguess.server.errors import ApiError

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
    """Stops reading a body at ``limit`` bytes, whatever its headers said, and answers 413."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(413, f"the body has more than {self.limit} bytes: send less")
            return message

        await self.app(scope, counted, send)
