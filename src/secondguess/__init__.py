"""secondguess: lossless speculative decoding that takes a second look (EAGLE-3.1 and Parallel Reconsideration)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.types import Delta, Output, SamplingParams, Stats

if TYPE_CHECKING:
    from secondguess.llm import LLM

__all__ = ["LLM", "Delta", "Output", "SamplingParams", "Stats", "TreeConfig", "UserError"]


def __getattr__(name: str) -> object:
    """``LLM`` is imported when it is first used: it brings torch and transformers."""
    if name == "LLM":
        from secondguess.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
