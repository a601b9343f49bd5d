"""Conversations to be answered, from the formats that people keep them in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.errors import UserError

# What people call who speaks: these are listened to, the others left out.
SPEAKERS = {"user": "user", "human": "user", "system": "system", "developer": "system"}
LEFT_OUT = (
    "assistant", "gpt", "chatgpt", "bing", "bard", "model", "tool", "tool_call", "tool_response", "function",
    "function_call", "function_response", "observation", "ipython",
)  # fmt: skip

Said = tuple[str | None, tuple[str, ...]]  # a system prompt, and a user's turns


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn. ``system`` is None where the chat template's own system prompt is to be used."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None

    @property
    def turn_ids(self) -> list[str]:
        """``ID``, ``ID#2``, ``ID#3``, ...: what the answers are called."""
        return [f"{self.id}#{number}" if number > 1 else self.id for number in range(1, len(self.turns) + 1)]


def read_conversations(paths: Iterable[Path]) -> list[Conversation]:
    """All conversations of all files, in order, each once: the same turns and system prompt again are left out.

    A line of a ``.jsonl`` file is an object with ``turns``, ``messages`` or ``conversations``; a ``.txt`` file has a
    prompt a line. Answers in the file are not used. Raises UserError, naming the line, for anything else.
    """
    found: dict[Said, Conversation] = {}
    places: dict[str, tuple[str, Said]] = {}
    for path in paths:
        for place, conversation in _read(path):
            said = (conversation.system, conversation.turns)
            for id_ in conversation.turn_ids:
                before, other = places.setdefault(id_, (place, said))
                if other != said:
                    raise UserError(f"{place}: id {id_!r} was used at {before}")
            found.setdefault(said, conversation)
    if not found:
        raise UserError("no prompts: the files are empty")
    return list(found.values())


def parse(row: Any, stem: str) -> Conversation:
    """``stem`` is the file's, and the source of a row that names none. Raises ValueError when the row is none of the
    known forms.
    """
    if not isinstance(row, dict):
        raise ValueError("a row must be an object with turns, messages or conversations")
    form = next((name for name in ("turns", "messages", "conversations") if name in row), None)
    if form is None:
        raise ValueError("a row needs turns, messages or conversations")
    system, turns = (row.get("system"), row[form]) if form == "turns" else _split(row[form], row.get("system"))
    if system is not None and not isinstance(system, str):
        raise ValueError("a system prompt must be text")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{form} must hold one user's text or more")
    conversation = Conversation(_id(row, stem, system, turns), str(row.get("source") or stem), tuple(turns), system)
    for text in (conversation.id, system or "", *turns):
        text.encode()  # no half characters
    return conversation


def _read(path: Path) -> Iterable[tuple[str, Conversation]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = {"turns": [line.decode()]} if path.suffix == ".txt" else json.loads(line)
            yield place, parse(row, path.stem)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error


def _split(messages: Any, system: Any) -> tuple[Any, list[Any]]:
    """The system prompt and the user's turns of messages {"role", "content"}, or ShareGPT's {"from", "value"}."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of objects")
    said = [(_speaker(m.get("role", m.get("from"))), m.get("content", m.get("value"))) for m in messages]
    systems = [text for who, text in said if who == "system"]
    if len(systems) > 1:
        raise ValueError("messages must hold one system prompt at most: join them")
    return (systems[0] if systems else system), [text for who, text in said if who == "user"]


def _speaker(role: Any) -> str | None:
    """``user`` or ``system``, None for who is left out. What somebody unknown says may matter: that is an error."""
    if role not in (*SPEAKERS, *LEFT_OUT):
        known = ", ".join((*SPEAKERS, *LEFT_OUT))
        raise ValueError(f"messages must be of a known role, one of {known}; got {role!r}: rename it or leave it out")
    return SPEAKERS.get(role)


def _id(row: dict[str, Any], stem: str, system: str | None, turns: Sequence[str]) -> str:
    """The row's own, or one that its text fixes."""
    if "id" in row:
        return str(row["id"])
    return f"{stem}/{hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()[:16]}"
