"""Slots that no request has. They hold their texts until they are needed, and a newcomer takes over what its own text
begins with: from one of these, or from a request that runs.

It reads the last token that both have in common again: the logits and taps after that one are kept nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from secondguess.engine.cycle import Engine
from secondguess.engine.speculate import Prefix
from secondguess.types import Speculation

LEAST = 16  # tokens that are taken over; fewer are soon read


@dataclass(frozen=True, slots=True)
class Text:
    """The K/V of all its tokens but the newest are in a slot."""

    slot: int
    token_ids: list[int]
    speculation: Speculation  # how it was drafted for


class FreeSlots:
    """``keeps``: whether texts are held at all, and taken over."""

    def __init__(self, engine: Engine, keeps: bool = True) -> None:
        self.engine, self.keeps = engine, keeps
        self.empty = set(range(engine.cache.num_slots))
        self.texts: list[Text] = []  # the one that was used last comes last

    def __iter__(self) -> Iterator[int]:
        yield from self.empty
        yield from (text.slot for text in self.texts)

    def __len__(self) -> int:
        return len(self.empty) + len(self.texts)

    def keep(self, texts: Iterable[Text]) -> None:
        """Their requests have ended."""
        ended = list(texts)
        held = [text for text in ended if self.keeps and len(text.token_ids) > LEAST]
        self.texts += held
        self.release([text.slot for text in ended if text not in held])

    def release(self, slots: Sequence[int]) -> None:
        """Nobody needs what they hold."""
        self._vacate(slots)  # first, so that none is lost whatever the rest raises
        for slot in slots:
            self.engine.cache.release(slot)
            self.engine.speculator.release(slot)

    def shrink(self, most: int) -> None:
        """Drop texts until those left have ``most`` tokens at most."""
        self.release(self._surplus(self.texts, most))

    def find(self, ids: list[int], speculation: Speculation, running: Sequence[Text]) -> Prefix | None:
        """The most that a newcomer with this text can take over. Whatever that is part of counts as used."""
        if not self.keeps:
            return None
        best = Prefix(-1, LEAST - 1)
        for text in (*self.texts, *running):
            common = num_common(text.token_ids, ids) - 1
            if common > best.count:
                count = self.engine.speculator.keeps(text.slot, speculation, common)
                best = max(best, Prefix(text.slot, count), key=lambda prefix: prefix.count)
        self.texts.sort(key=lambda text: text.slot == best.slot)
        return best if best.slot >= 0 else None

    def take(self, ids: list[int], speculation: Speculation, prefix: Prefix | None, most: float = math.inf) -> int:
        """The lowest slot, for a newcomer with this text, which then begins with ``prefix``, as ``find`` said.

        (The slots of a batch lie side by side as far as they can: that is read faster.) A text that was there moves to
        another slot, unless none is empty or holds an older one. Texts with which the newcomer's begins are dropped,
        it holds all that they do; and older ones if they have more than ``most`` tokens besides.
        """
        slot, source = min(self), prefix.slot if prefix else -1
        within = [text.slot for text in self.texts if text.token_ids == ids[: len(text.token_ids)]]
        others = [text for text in self.texts if text.slot not in within]
        dropped = [*within, *self._surplus(others, most)]
        self.release([other for other in dropped if other not in (slot, source)])
        for text in others:
            if text.slot == slot and slot not in dropped:
                self._move(text)
        if slot == source:
            self._vacate([slot])
        elif slot not in self.empty:
            self.release([slot])
        self._begin(slot, speculation, prefix)
        self.release([source] if source in dropped and source != slot else [])
        self.empty.remove(slot)
        return slot

    def _move(self, text: Text) -> None:
        older = self.texts[: self.texts.index(text)]
        if not self.empty and older:
            self.release([older[0].slot])
        if self.empty:
            goal, speculation = min(self.empty), text.speculation
            count = self.engine.speculator.keeps(text.slot, speculation, len(text.token_ids) - 1)
            self._begin(goal, speculation, Prefix(text.slot, count))
            self.empty.remove(goal)
            self.texts[self.texts.index(text)] = replace(text, slot=goal, token_ids=text.token_ids[: count + 1])

    def _begin(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        if prefix and prefix.slot != slot:
            self.engine.cache.copy(prefix.slot, slot, prefix.count)
        self.engine.speculator.admit(slot, speculation, prefix)

    def _vacate(self, slots: Sequence[int]) -> None:
        self.texts = [text for text in self.texts if text.slot not in slots]
        self.empty.update(slots)

    def _surplus(self, texts: Sequence[Text], most: float) -> list[int]:
        """Slots of the texts that were used longest ago, without which the others have ``most`` tokens at most."""
        left, slots = sum(len(text.token_ids) for text in texts), []
        for text in texts:
            if left > most:
                slots.append(text.slot)
                left -= len(text.token_ids)
        return slots


def num_common(a: list[int], b: list[int]) -> int:
    """Tokens with which both begin. Slices are compared in C: requests that run wait meanwhile."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
