"""Prompts from nothing but the target: a chat model fills a user's turn as readily as its own.

The method is Magpie's (arXiv 2406.08464): the chat template up to where a user's words begin is continued until the
token that ends a turn. What is no prompt is refused by rules, not by a judge.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from secondguess.bench.plan import prompt_seed
from secondguess.errors import UserError
from secondguess.prepare.answerer import Answerer, Question, Reply
from secondguess.prepare.line_file import LineFile
from secondguess.prepare.overlap import Index
from secondguess.prepare.template import UserTurn
from secondguess.types import SamplingParams

TEMPERATURE, TOP_P = 1.0, 0.95  # top-k is off
MAX_TOKENS = 384
SHORTEST, LONGEST = 12, 1200  # letters and digits; characters
PATIENCE = 400  # draws refused in a row

Refusal = Literal["not ended", "too short", "too long", "no plain text", "doublet", "benchmark text"]


class PromptFile(LineFile):
    """Lines ``{"id", "source", "turns"}``, with ``system`` where it is not the template's own."""

    what = "synthesised prompt"

    def __init__(self, path: Path) -> None:
        self.ids: list[str] = []
        self.texts: set[str] = set()
        super().__init__(path)

    def learn(self, row: Mapping[str, Any]) -> None:
        self.ids.append(row["id"])
        self.texts.add(normalised(row["turns"][0]))

    def next_number(self, prefix: str) -> int:
        """The draws before it are kept or refused."""
        return max((int(id_.removeprefix(prefix)) + 1 for id_ in self.ids if id_.startswith(prefix)), default=0)


@dataclass(frozen=True, slots=True)
class Synthesis:
    """``turns`` are filled in turn. Draw ``n`` is called ``{prefix}{n}``; it depends on that and ``seed`` alone.

    ``special_ids`` are tokens that no user types; ``index`` has the text of benchmarks.
    """

    turns: Sequence[UserTurn]
    seed: int
    prefix: str
    special_ids: frozenset[int]
    index: Index

    def question(self, number: int) -> Question:
        turn = self._turn(number)
        params = SamplingParams(
            temperature=TEMPERATURE,
            top_p=TOP_P,
            max_tokens=MAX_TOKENS,
            stop=turn.stop,
            stop_token_ids=turn.stop_token_ids,
            seed=prompt_seed(self.seed, f"synthesised {number}"),
        )
        return Question(turn.prompt_ids, params)

    def row(self, number: int, text: str) -> dict[str, Any]:
        system = self._turn(number).system
        row = {"id": f"{self.prefix}{number}", "source": "synthesised", "turns": [text]}
        return row if system is None else row | {"system": system}

    def refusal(self, reply: Reply, known: set[str]) -> Refusal | None:
        """Why what was written is no prompt; ``known`` are the normalised texts of those that are."""
        text, plain = reply.text.strip(), normalised(reply.text)
        if not reply.ended:
            return "not ended"
        if not is_plain(text) or not self.special_ids.isdisjoint(reply.token_ids[:-1]):
            return "no plain text"
        if len(plain) < SHORTEST:
            return "too short"
        if len(text) > LONGEST:
            return "too long"
        if plain in known:
            return "doublet"
        return "benchmark text" if self.index.shared(text) else None

    def _turn(self, number: int) -> UserTurn:
        return self.turns[number % len(self.turns)]


async def synthesize(
    answerer: Answerer, synthesis: Synthesis, file: PromptFile, wanted: int, on_draw: Callable[[Refusal | None], None]
) -> None:
    """Add prompts until ``file`` has ``wanted``; ``on_draw`` hears why a draw was refused, or None.

    Draws are judged in order, however they finish, so the file depends neither on the batch nor on interruptions.
    Raises UserError when nearly everything is refused.
    """
    numbers, refused = count(file.next_number(synthesis.prefix)), 0
    draws: deque[tuple[int, asyncio.Task[Reply | None]]] = deque()
    try:
        while len(file.ids) < wanted:
            while len(draws) < answerer.room:
                number = next(numbers)
                draws.append((number, asyncio.create_task(answerer.answer(synthesis.question(number)))))
            number, draw = draws.popleft()
            reply = await draw
            refusal = synthesis.refusal(reply, file.texts) if reply else "not ended"
            if refusal is None and reply:
                file.add(synthesis.row(number, reply.text.strip()))
            on_draw(refusal)
            refused = refused + 1 if refusal else 0
            if refused == PATIENCE:
                raise UserError(f"{PATIENCE} draws in a row were no prompts, the last one {refusal}: give prompts")
    finally:
        for _, draw in draws:
            draw.cancel()
        await asyncio.gather(*(draw for _, draw in draws), return_exceptions=True)


def normalised(text: str) -> str:
    """Letters and digits alone, in one case: the same question again in other clothes is a doublet."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def is_plain(text: str) -> bool:
    """Whether all of it can be printed, and no byte of it was undecodable."""
    return "\N{REPLACEMENT CHARACTER}" not in text and all(c.isprintable() or c in "\n\t" for c in text)
