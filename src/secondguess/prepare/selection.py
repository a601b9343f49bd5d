"""Which conversations of some files are answered, and in what order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from secondguess.errors import UserError
from secondguess.prepare.overlap import Index
from secondguess.prepare.prompts import Conversation, read_conversations

WINDOW = 16  # batches whose conversations are sorted by length


@dataclass(frozen=True, slots=True)
class Selection:
    """``limit`` conversations, evenly spaced over the files; then those that share text with ``benchmarks`` are left
    out, or refused. ``system`` is for those that have no system prompt.
    """

    limit: int | None
    system: str | None
    benchmarks: Index
    leave_out: bool
    batch_size: int

    def read(self, paths: Sequence[Path]) -> list[Conversation]:
        """Raises UserError for a broken file, and for shared text unless that is to be left out."""
        found = read_conversations(paths)
        if self.limit is not None and self.limit < len(found):
            found = [found[i * len(found) // self.limit] for i in range(self.limit)]
        kept = [replace(c, system=self.system) if c.system is None else c for c in found if self._is_clean(c)]
        return arrange(kept, self.batch_size)

    def _is_clean(self, conversation: Conversation) -> bool:
        shared = next(filter(None, map(self.benchmarks.shared, conversation.turns)), None)
        if shared and not self.leave_out:
            raise UserError(f"prompt {conversation.id} shares {shared!r} with a benchmark: give --leave-out-overlap")
        return not shared


def arrange(conversations: Iterable[Conversation], batch_size: int) -> list[Conversation]:
    """An order that mixes the files, so that what an interrupted run has is a fair sample, and in which neighbours are
    of like length: every row of a batch reads K/V as far as the longest one does.
    """
    mixed = sorted(conversations, key=lambda c: hashlib.sha256(c.id.encode()).digest())
    size, ordered = WINDOW * batch_size, []
    for number, start in enumerate(range(0, len(mixed), size)):
        # Up, then down, and so on: neighbours are alike also where two windows meet.
        ordered += sorted(mixed[start : start + size], key=length, reverse=bool(number % 2))
    return ordered


def length(conversation: Conversation) -> int:
    """Characters that its last prompt holds, answers aside."""
    return sum(map(len, conversation.turns)) + len(conversation.system or "")
