"""Conversations to be answered, from the formats that people keep them in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.errors import UserError


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn. ``system`` is None where the chat template's own system prompt is to be used."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None


def read_conversations(paths: Sequence[Path]) -> list[Conversation]:
    """All conversations of all files, in order, each once: the same turns and system prompt again are left out.

    A line of a ``.jsonl`` file is an object with ``turns``, ``messages`` or ShareGPT's ``conversations``; a ``.txt``
    file has a prompt a line. Answers in the file are not used. Raises UserError, naming the line, for anything else.
    """
    found: dict[tuple[str | None, tuple[str, ...]], Conversation] = {}
    ids: dict[str, str] = {}
    for path in paths:
        for place, conversation in _read(path):
            if conversation.id in ids:
                raise UserError(f"{place}: id {conversation.id!r} was used at {ids[conversation.id]}")
            ids[conversation.id] = place
            found.setdefault((conversation.system, conversation.turns), conversation)
    if not found:
        raise UserError("no prompts: the files are empty")
    return list(found.values())


def parse(row: Any, source: str) -> Conversation:
    """Raises ValueError when the row is none of the known forms."""
    if not isinstance(row, dict):
        raise ValueError("a row must be an object with turns, messages or conversations")
    forms = {"turns": _from_turns, "messages": _from_messages, "conversations": _from_share_gpt}
    form = next((name for name in forms if name in row), None)
    if form is None:
        raise ValueError("a row needs turns, messages or conversations")
    system, turns = forms[form](row[form])
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{form} must hold one user's text or more")
    return Conversation(_id(row, source, system, turns), source, tuple(turns), system)


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


def _from_turns(turns: Any) -> tuple[str | None, list[Any]]:
    return None, turns if isinstance(turns, list) else []


def _from_messages(messages: Any) -> tuple[str | None, list[Any]]:
    return _split(messages, "role", "content", {"user": "user", "system": "system"})


def _from_share_gpt(messages: Any) -> tuple[str | None, list[Any]]:
    return _split(messages, "from", "value", {"human": "user", "user": "user", "system": "system"})


def _split(messages: Any, role: str, content: str, roles: dict[str, str]) -> tuple[str | None, list[Any]]:
    """The system prompt and the user's turns; what an assistant or a tool said is left out."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of objects")
    said = [(roles.get(str(m.get(role))), m.get(content)) for m in messages]
    system = next((text for who, text in said if who == "system"), None)
    if system is not None and not isinstance(system, str):
        raise ValueError("a system prompt must be text")
    return system, [text for who, text in said if who == "user"]


def _id(row: dict[str, Any], source: str, system: str | None, turns: Sequence[str]) -> str:
    """The row's own, or one that its text fixes."""
    if "id" in row:
        return str(row["id"])
    return f"{source}/{hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()[:16]}"
