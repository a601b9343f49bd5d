"""What a server is set up with, besides its LLM."""

from __future__ import annotations

import math
from dataclasses import dataclass

from secondguess.config import option
from secondguess.errors import require
from secondguess.fields import check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Raises UserError when a field is out of range."""

    served_model_name: str | None = option(None, "the model's name in the API (default: TARGET as given)")
    api_key: str | None = option(
        None, "clients must send it as a bearer token; better in SECONDGUESS_API_KEY, which other users cannot list"
    )
    allow_origin: tuple[str, ...] = option((), "web pages from here may call the API; may be repeated, * is any")
    max_queue: int = option(256, "answers that may wait for a place in the batch; more are refused with 429")
    max_body_bytes: int = option(4 * 2**20, "larger request bodies are answered with 413")
    request_timeout: float = option(
        600.0, "seconds that a request may take, from its arrival to the last byte of its answer"
    )
    drain_timeout: float = option(120.0, "seconds that running requests get to end after SIGTERM")

    def __post_init__(self) -> None:
        check_numbers(self)
        require(self.max_queue >= 0, f"max_queue must be at least 0, got {self.max_queue}")
        require(self.max_body_bytes >= 1024, f"max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"{name} must be above 0, got {value}")
        require(self.api_key is None or self.api_key.isascii(), "api_key must be ASCII: it travels in a header")
        require(self.api_key is None or bool(self.api_key.strip()), "api_key must not be empty: leave it out")
