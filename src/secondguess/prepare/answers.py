"""The target answers conversations, batched; every answer is on disk as soon as it is finished.

A line is ``{"id", "source", "temperature", "seed", "prompt_len", "input_ids"}``: what ``train`` reads. A later turn is
a line of its own, whose prompt holds the conversation so far; its id is ``ID#2``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secondguess.atomic import whole_lines
from secondguess.bench.plan import prompt_seed
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prepare.compact import Answer
from secondguess.prepare.prompts import Conversation
from secondguess.prompts import Message
from secondguess.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Recipe:
    """How answers are drawn. A conversation's temperature is drawn by its id, so that more prompts change no answer.

    ``given`` are answers that are taken as they are.
    """

    temperatures: tuple[float, ...]
    max_new_tokens: int
    top_k: int
    seed: int
    given: Mapping[str, Answer] = field(default_factory=dict)

    def temperature(self, id_: str) -> float:
        return self.temperatures[prompt_seed(self.seed, f"temperature of {id_}") % len(self.temperatures)]


class AnswerFile:
    """Answers that are there stay, and are not asked for again; a line that a kill cut short is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, list[int]] = {}
        if path.exists():
            for number, line in enumerate(whole_lines(path), 1):
                self._learn(line, number)

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.answers[line["id"]] = line["input_ids"][line["prompt_len"] :]

    def _learn(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            self.answers[row["id"]] = row["input_ids"][row["prompt_len"] :]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}:{number} is no answer row ({error!r}): give another --out") from error


async def answer_all(
    llm: LLM,
    conversations: Sequence[Conversation],
    recipe: Recipe,
    file: AnswerFile,
    on_answer: Callable[[int], None],
) -> None:
    """Answer what ``file`` lacks. ``on_answer`` hears of the tokens of every answer, first of those that are there."""
    # Twice what decodes together: the next prompt is there when a slot is free, and the others do not fill the memory.
    room = asyncio.Semaphore(2 * llm.engine.cache.num_slots)

    async def one(conversation: Conversation) -> None:
        async with room:
            async for line, tokens in talk(llm, conversation, recipe, file.answers):
                if line is not None:
                    file.add(line)
                on_answer(len(tokens))

    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            group.create_task(one(conversation))


async def talk(
    llm: LLM, conversation: Conversation, recipe: Recipe, known: dict[str, list[int]]
) -> AsyncGenerator[tuple[dict[str, Any] | None, list[int]]]:
    """Each turn's line (None if it is known) and answer."""
    messages: list[Message] = list(opening(conversation))
    temperature = recipe.temperature(conversation.id)
    for turn, text in enumerate(conversation.turns, 1):
        id_ = f"{conversation.id}#{turn}" if turn > 1 else conversation.id
        messages.append({"role": "user", "content": text})
        if id_ in known:
            tokens = known[id_]
            yield None, tokens
        else:
            prompt_ids = llm.encode(messages)
            if len(prompt_ids) + recipe.max_new_tokens > llm.max_model_len:
                return  # what fits no more is not asked
            answer = recipe.given.get(id_) or await ask(llm, id_, prompt_ids, temperature, recipe)
            tokens = list(answer.tokens)
            yield row(conversation.source, prompt_ids, answer), tokens
        messages.append({"role": "assistant", "content": llm.target.tokenizer.decode(tokens, skip_special_tokens=True)})


def opening(conversation: Conversation) -> Iterator[Message]:
    if conversation.system is not None:
        yield {"role": "system", "content": conversation.system}


async def ask(llm: LLM, id_: str, prompt_ids: Sequence[int], temperature: float, recipe: Recipe) -> Answer:
    params = SamplingParams(
        temperature=temperature,
        top_k=recipe.top_k if temperature else 0,
        max_tokens=recipe.max_new_tokens,
        seed=prompt_seed(recipe.seed, id_),
    )
    output = None
    async for delta in llm.agenerate(prompt_ids, params):
        output = delta.output
    assert output is not None
    return Answer(id_, temperature, output.seed, output.token_ids)


def row(source: str, prompt_ids: Sequence[int], answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.id,
        "source": source,
        "temperature": answer.temperature,
        "seed": answer.seed,
        "prompt_len": len(prompt_ids),
        "input_ids": [*prompt_ids, *answer.tokens],
    }
