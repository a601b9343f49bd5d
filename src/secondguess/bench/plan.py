"""Which methods run, with which budgets, on which prompts in which groups."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from secondguess.config import TreeConfig
from secondguess.methods import SHAPE, Method, parse_method


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids."""

    task: str
    id: str
    ids: tuple[int, ...]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts of one task that are decoded together."""

    number: int
    prompts: tuple[Prompt, ...]

    @property
    def task(self) -> str:
        return self.prompts[0].task


def shape(method: Method) -> dict[str, int | str]:
    """What a bench row tells of a method's tree: 0 where it has no use for a setting; a budget may be "auto"."""
    return {name: getattr(method.tree, name) if name in method.uses else 0 for name in SHAPE}


def line_up(methods: Sequence[str], trees: Sequence[TreeConfig]) -> list[Method]:
    """Every method with every tree; plain decoding first and once. A method that names its own budget runs once.

    Raises UserError for an unknown method or setting.
    """
    plain = parse_method("ar", trees[0])
    parsed = [parse_method(typed, tree) for typed in methods for tree in trees]
    return [plain, *dict.fromkeys(method for method in parsed if method.name != "ar")]


def make_groups(prompts: Sequence[Prompt], batch_size: int) -> list[Group]:
    """Consecutive prompts of one task; a task's last group may be smaller."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    chunks = [t[i : i + batch_size] for t in tasks.values() for i in range(0, len(t), batch_size)]
    return [Group(number, tuple(chunk)) for number, chunk in enumerate(chunks)]


def row_of(prompt_id: str) -> str:
    """The task's row that a prompt is a turn of: ``ID`` of ``ID#2``."""
    row, _, turn = prompt_id.rpartition("#")
    return row if row and turn.isdigit() else prompt_id


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A prompt's seed depends on its id and the run's seed alone, so it is the same for every method and subset."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # seeds have 63 bits
