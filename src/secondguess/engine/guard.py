"""A drafter that stops paying is switched off with a warning; plain decoding goes on, and it is tried again.

That is for requests that leave it to the server. Whoever asks for a method or a budget gets it, and so do those that
share the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from secondguess.engine.regime import warmth
from secondguess.engine.speculate import Accepted, Draw, Plain, Prefix, Roots, Speculator
from secondguess.engine.switch import Switch
from secondguess.types import AS_USUAL, DraftTree, Speculation, Verdict

log = logging.getLogger(__name__)

SLOWER = (
    "method %s is slower than plain decoding in batches of %d: there it is switched off, and tried again from time to "
    "time (a smaller budget may pay)"
)


@dataclass(slots=True)
class Trial:
    """Drafting against plain decoding in batches of one kind. The first plain cycle gives the unit of time."""

    switch: Switch = field(default_factory=Switch)
    unit: float | None = None  # seconds

    def learn(self, drafted: bool, tokens: float, seconds: float, requests: int) -> bool:
        """``tokens`` per request. Returns whether drafting has just been given up, after it had paid or for the first
        time.
        """
        if self.unit is None and not drafted:
            self.unit = seconds
        return self.unit is not None and self.switch.learn(drafted, tokens, seconds / self.unit, requests)


class Guard:
    """A speculator of one tree shape that drafts as long as that is faster than plain decoding.

    The two are compared by ``Switch``, for every size and temperature of a batch by itself.
    """

    def __init__(self, name: str, inner: Speculator) -> None:
        self.name, self.inner = name, inner
        self.insisting: set[int] = set()  # slots whose requests want to be drafted for, whatever it takes
        self.trials: dict[tuple[int, int], Trial] = {}
        self.trial: Trial | None = None  # of the newest draft; None if there was no choice
        self.drafted = False  # whether there was one

    @property
    def paused(self) -> bool:
        """Whether drafting is switched off for batches like the newest one."""
        return self.trial is not None and self.trial.switch.pause > 0

    def keeps(self, slot: int, speculation: Speculation, count: int) -> int:
        return self.inner.keeps(slot, speculation, count)

    def admit(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        (self.insisting.discard if speculation == AS_USUAL else self.insisting.add)(slot)
        self.inner.admit(slot, speculation, prefix)

    def draft(self, roots: Roots) -> DraftTree:
        free = self.insisting.isdisjoint(roots.slots)
        self.trial = self.trials.setdefault(kind(roots.draws), Trial()) if free else None
        self.drafted = self.trial is None or self.trial.switch.drafts()
        return (self.inner if self.drafted else Plain()).draft(roots)

    def accept(self, accepted: list[Accepted]) -> None:
        self.inner.accept(accepted)

    def release(self, slot: int) -> None:
        self.insisting.discard(slot)
        self.inner.release(slot)

    def steps_for(self, slot: int) -> int:
        return self.inner.steps_for(slot) if self.drafted else 0

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        self.inner.learn(tree, verdict, seconds)
        requests = len(tree.tokens_RN)
        tokens = float(verdict.num_emitted_R.sum()) / requests
        if self.trial and self.trial.learn(self.drafted, tokens, seconds, requests):
            log.warning(SLOWER, self.name, requests)


def kind(draws: Sequence[Draw]) -> tuple[int, int]:
    """Batches of so many requests, of about one temperature."""
    return len(draws), round(sum(map(warmth, draws)) / len(draws))
