"""Requests of one batch that are drafted for by different methods, and with smaller budgets if they want.

R requests, N tree nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from secondguess.engine.guard import Guard
from secondguess.engine.speculate import Accepted, Plain, Prefix, Roots, Speculator
from secondguess.tree.trim import row_of, side_by_side, trim
from secondguess.types import DraftTree, Speculation, Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Trees for some of a batch's requests."""

    rows: Sequence[int]
    tree: DraftTree


class Menu:
    """A speculator for each method on offer; every request has the one that it wants.

    One that raises is switched off with a warning, and its requests go on without speculation: no text depends on it.
    """

    def __init__(self, speculators: Mapping[str, Speculator], default: str) -> None:
        self.speculators, self.default = dict(speculators), default
        self.wishes: dict[int, Speculation] = {}  # by slot, of the request that began there last
        self.switched_off: dict[str, str] = {}  # methods, and why
        self.drafted: list[str] = []  # methods that took part in the newest draft

    @property
    def paused(self) -> bool:
        """Whether the default method is switched off for now, because plain decoding is faster."""
        speculator = self.speculators[self.default]
        return isinstance(speculator, Guard) and speculator.paused

    def keeps(self, slot: int, speculation: Speculation, count: int) -> int:
        return self.speculators[speculation.method or self.default].keeps(slot, speculation, count)

    def admit(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        """What the other methods know of an earlier text there is worth nothing from now on."""
        self.wishes[slot] = speculation
        for method in self.speculators:
            with self._guarding(method):
                if method == (speculation.method or self.default):
                    self.speculators[method].admit(slot, speculation, prefix)
                else:
                    self.speculators[method].release(slot)

    def draft(self, roots: Roots) -> DraftTree:
        parts, groups = [], self._by_method(roots.slots)
        self.drafted = [*groups]
        for method, rows in groups.items():
            tree = self._draft(method, subset(roots, rows))
            parts += cut_down(tree, rows, [self.wishes[roots.slots[r]].budget for r in rows])
        if len(parts) == 1:
            return parts[0].tree
        order = [r for part in parts for r in part.rows]
        return side_by_side([part.tree for part in parts], order)

    def accept(self, accepted: list[Accepted]) -> None:
        for method, rows in self._by_method(a.slot for a in accepted).items():
            with self._guarding(method):
                self.speculators[method].accept([accepted[r] for r in rows])

    def release(self, slot: int) -> None:
        self.wishes.pop(slot, None)
        for method in self.speculators:
            with self._guarding(method):
                self.speculators[method].release(slot)

    def steps_for(self, slot: int) -> int:
        return self.speculators[self.wishes[slot].method or self.default].steps_for(slot)

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """A cycle that several methods shared says nothing of what any of them takes."""
        if len(self.drafted) == 1:
            with self._guarding(self.drafted[0]):
                self.speculators[self.drafted[0]].learn(tree, verdict, seconds)

    def _by_method(self, slots: Iterable[int]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for r, slot in enumerate(slots):
            groups.setdefault(self.wishes[slot].method or self.default, []).append(r)
        return groups

    def _draft(self, method: str, roots: Roots) -> DraftTree:
        with self._guarding(method):
            return self.speculators[method].draft(roots)
        return self.speculators[method].draft(roots)  # it has just been switched off

    @contextmanager
    def _guarding(self, method: str) -> Generator[None]:
        """Whatever a drafter raises, the target can go on: the method is switched off, which changes a value of
        ``speculators`` and no key.
        """
        try:
            yield
        except Exception as error:
            log.warning("method %s failed and is switched off, decoding goes on without it", method, exc_info=error)
            self.switched_off[method] = f"{type(error).__name__}: {error}"
            self.speculators[method] = Plain()


def subset(roots: Roots, rows: Sequence[int]) -> Roots:
    """Some of the requests, in this order."""
    return Roots(
        slots=tuple(roots.slots[r] for r in rows),
        tokens=tuple(roots.tokens[r] for r in rows),
        histories=tuple(roots.histories[r] for r in rows),
        draws=tuple(roots.draws[r] for r in rows),
        device=roots.device,
    )


def cut_down(tree: DraftTree, rows: Sequence[int], budgets: Sequence[int | None]) -> list[Part]:
    """The trees of ``rows``; where there is a budget, no larger than it."""
    whole = [r for r, budget in enumerate(budgets) if budget is None]
    if len(whole) == len(rows):
        return [Part(rows, tree)]
    parts = [Part([rows[r]], trim(tree, r, budget)) for r, budget in enumerate(budgets) if budget is not None]
    return parts + [Part([rows[r]], row_of(tree, r)) for r in whole]
