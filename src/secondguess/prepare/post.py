"""JSON to a server and back, asked again while it is busy. Whoever imports this needs httpx2."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx2

from secondguess.errors import UserError

TRIES = 6
TIMEOUT_S = 600.0  # of one answer
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
BUSY = (408, 429, 500, 502, 503, 504)  # worth another try


class Refused(UserError):
    """The server said no, and would again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong for now, and the seconds that the server asks to wait."""

    problem: str
    wait: float = 0.0


class Server:
    """``key`` is the bearer token; ``room`` requests may be on their way at once."""

    def __init__(self, url: str, key: str | None, room: int) -> None:
        self.url = url.rstrip("/")
        self._reached = False
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(TIMEOUT_S, connect=10, pool=None),
            limits=httpx2.Limits(max_connections=room),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, route: str, fields: dict[str, Any]) -> dict[str, Any]:
        """What fails is sent again after a wait that doubles, or for as long as the server says.

        Raises Refused when it says no, UserError when it is not there or speaks no JSON, and ConnectionError when it
        fails TRIES times.
        """
        failure = Failure("")
        for attempt in range(TRIES):
            if attempt:
                # Not all at the same time: they failed together.
                doubled = FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1)
                await asyncio.sleep(min(max(failure.wait, doubled), LONGEST_WAIT_S))
            answer = await self._try(route, fields)
            if isinstance(answer, httpx2.Response):
                return self._read(answer)
            failure = answer
        problem = f"{self.url} failed {TRIES} times ({failure.problem})"
        raise ConnectionError(f"{problem}; the same command goes on from here")

    async def _try(self, route: str, fields: dict[str, Any]) -> httpx2.Response | Failure:
        try:
            response = await self._client.post(f"{self.url}/{route}", json=fields)
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ConnectError) and not self._reached:
                raise UserError(f"nothing answers at {self.url}: start the server, or mend --endpoint") from error
            return Failure(type(error).__name__)
        self._reached = True
        if response.status_code not in BUSY:
            return response
        wait = response.headers.get("retry-after", "")
        return Failure(brief(response), float(wait) if wait.isdigit() else 0.0)

    def _read(self, response: httpx2.Response) -> dict[str, Any]:
        if response.status_code != 200:
            message = f"{self.url} refuses ({brief(response)}): check --endpoint, --model and OPENAI_API_KEY"
            raise Refused(response.status_code, message)
        try:
            return dict(response.json())
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.url} does not answer in JSON: check --endpoint") from error


def brief(response: httpx2.Response) -> str:
    return f"{response.status_code} {' '.join(response.text.split())[:200]}".strip()
