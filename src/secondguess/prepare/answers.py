"""The target answers conversations, many at once; every answer is in the file as soon as it is finished.

A line is ``{"id", "source", "temperature", "seed", "prompt_len", "input_ids"}``: what ``train`` reads. A later turn is
a line of its own, whose prompt holds the conversation so far; its id is ``ID#2``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from secondguess import digests
from secondguess.bench.plan import prompt_seed
from secondguess.prepare.answerer import Answerer, Question, TooLong
from secondguess.prepare.chat import Chat
from secondguess.prepare.compact import Answer, answer_of
from secondguess.prepare.line_file import LineFile
from secondguess.prepare.prompts import Conversation
from secondguess.prepare.template import assistant, opening, user
from secondguess.prompts import Message
from secondguess.types import SamplingParams

# Kept: it was in the file. Given: in another. Too long: its prompt leaves no room for an answer. Unknown: it was
# answered, but not in tokens that are certain. Not given: and others are not wanted. A conversation ends at the last
# three.
Outcome = Literal["kept", "given", "answered", "too long", "unknown", "not given"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How answers are drawn. A conversation's temperature is drawn by its id, so that more prompts change no answer.

    ``given`` are answers that are taken as they are; with ``only_given`` there are no others.
    """

    temperatures: tuple[float, ...]
    max_new_tokens: int
    top_k: int
    seed: int
    given: Mapping[str, Answer] = field(default_factory=dict)
    only_given: bool = False

    def temperature(self, id_: str) -> float:
        return self.temperatures[prompt_seed(self.seed, f"temperature of {id_}") % len(self.temperatures)]

    def params(self, id_: str, temperature: float) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k if temperature else 0,
            max_tokens=self.max_new_tokens,
            seed=prompt_seed(self.seed, id_),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of ``count`` turns of a conversation: of one, or without an answer of all that are left."""

    outcome: Outcome
    prompt_ids: tuple[int, ...] = ()
    answer: Answer | None = None
    count: int = 1


class AnswerFile(LineFile):
    what = "answer row"

    def __init__(self, path: Path) -> None:
        self.answers: dict[str, Answer] = {}
        super().__init__(path)

    def learn(self, row: Mapping[str, Any]) -> None:
        answer = answer_of(row)
        self.answers[answer.id] = answer


@dataclass(frozen=True, slots=True)
class Writer:
    """Who answers, in what manner, and where to."""

    answerer: Answerer
    chat: Chat
    recipe: Recipe
    file: AnswerFile

    async def answer_all(self, conversations: Sequence[Conversation], on_turn: Callable[[Turn], None]) -> None:
        """Answer what the file lacks. ``on_turn`` hears of every turn. An error ends all; what is written stays.

        Raises UserError where an answer that is there was given to another prompt, and what the answerer raises.
        """
        room = asyncio.Semaphore(self.answerer.room)

        async def one(conversation: Conversation) -> None:
            async with room:
                async for turn in self._talk(conversation):
                    if turn.answer and turn.outcome != "kept":
                        self.file.add(row(conversation.source, turn.prompt_ids, turn.answer, self.chat.variables))
                    on_turn(turn)

        try:
            async with asyncio.TaskGroup() as group:
                for conversation in conversations:
                    group.create_task(one(conversation))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first to fail; the others are its like

    async def _talk(self, conversation: Conversation) -> AsyncGenerator[Turn]:
        messages = opening(conversation.system)
        temperature = self.recipe.temperature(conversation.id)
        for number, (id_, text) in enumerate(zip(conversation.turn_ids, conversation.turns, strict=True)):
            messages.append(user(text))
            turn = await self._turn(id_, temperature, messages)
            if turn.answer is None:
                yield replace(turn, count=len(conversation.turns) - number)
                return
            yield turn
            text = self.chat.tokenizer.decode(list(turn.answer.tokens), skip_special_tokens=True)
            messages.append(assistant(str(text)))

    async def _turn(self, id_: str, temperature: float, messages: Sequence[Message]) -> Turn:
        prompt_ids = self.chat.encode(messages)
        outcome: Outcome = "kept" if id_ in self.file.answers else "given"
        answer = self.file.answers.get(id_) or self.recipe.given.get(id_)
        if answer is not None:
            answer.check_prompt(prompt_ids)
            return Turn(outcome, prompt_ids, answer)
        if self.recipe.only_given:
            return Turn("not given")
        if len(prompt_ids) + self.recipe.max_new_tokens > self.chat.context_len:
            return Turn("too long")
        params = self.recipe.params(id_, temperature)
        try:
            reply = await self.answerer.answer(Question(prompt_ids, params, tuple(messages)))
        except TooLong:
            return Turn("too long")
        if reply is None:
            return Turn("unknown")
        of_prompt = (len(prompt_ids), digests.of_tokens(prompt_ids))
        return Turn("answered", prompt_ids, Answer(id_, temperature, params.seed, reply.token_ids, *of_prompt))


def longest_prompt(chat: Chat, conversations: Iterable[Conversation], max_new_tokens: int) -> int:
    """In tokens; 0 of none. A later turn's holds the conversation so far, with answers that are as long as they may be.

    Raises UserError when the template refuses a conversation.
    """
    longest = 0
    for conversation in conversations:
        messages = opening(conversation.system)
        for text in conversation.turns:
            messages += [user(text), assistant("")]
        prompt_ids = chat.encode_rendered(chat.render(messages[:-1]))
        longest = max(longest, len(prompt_ids) + (len(conversation.turns) - 1) * max_new_tokens)
    return longest


def row(source: str, prompt_ids: Sequence[int], answer: Answer, variables: Mapping[str, Any]) -> dict[str, Any]:
    """``variables``: those of the chat template; a row of none does not speak of them."""
    return {
        "id": answer.id,
        "source": source,
        "temperature": answer.temperature,
        "seed": answer.seed,
        "prompt_len": len(prompt_ids),
        **({"template_variables": dict(variables)} if variables else {}),
        "input_ids": [*prompt_ids, *answer.tokens],
    }
