"""Who writes: the target in our own engine, or (``endpoint``) behind somebody else's server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prompts import Message
from secondguess.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Question:
    """Something to be continued. ``messages`` render to ``prompt_ids``; None where the prompt is no conversation."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """``token_ids`` end with the end token if the text ``ended`` by itself; ``text`` has no special tokens."""

    token_ids: tuple[int, ...]
    text: str
    ended: bool


class TooLong(UserError):
    """The prompt and an answer do not fit where they would be written."""


class Answerer(Protocol):
    @property
    def room(self) -> int:
        """How many questions it has use for at once."""
        ...

    async def answer(self, question: Question) -> Reply | None:
        """None when what was written cannot be known token for token. Raises TooLong."""
        ...


class Local:
    """The target in our own engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        # Twice what decodes together: the next prompt is there when a slot is free, the others do not fill the memory.
        self.room = 2 * llm.engine.cache.num_slots

    async def answer(self, question: Question) -> Reply:
        output = None
        async for delta in self._llm.agenerate(question.prompt_ids, question.params):
            output = delta.output
        assert output is not None, "the last delta brings the output"
        return Reply(output.token_ids, output.text, output.finish_reason == "stop")
