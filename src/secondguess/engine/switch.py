"""Whether to draft at all: both ways of decoding are timed, and the faster one goes on.

Tokens per cycle scatter more than their mean differs between the two ways, so drafting is given up only when even a
hopeful estimate of it is below plain decoding: one of the last few dozen cycles, where much is lost, or one of the last
few hundred. The pause that follows is so long that what was lost is a small share of it: the more drafting loses, the
more rarely it is tried again. Times are in units of what a plain cycle of that batch should take, so that batches of
about one size can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

SPREAD = 1.2  # of a cycle's accepted tokens, relative to the root of their mean
FIRST_TRIAL, TRIAL = 3, 2  # drafted cycles before the verdict
ALLOWED_LOSS = 0.01  # of the time of the pause that makes up for it
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 512  # plain cycles between two trials
FIRST_PEEK, LONGEST_PEEK = 4, 64  # drafted cycles between two plain ones
SETTLED = 64  # drafted cycles that win make it news that drafting loses
SHORT, LONG = 0.97, 0.998  # memories, see ``Ratio.keep``


@dataclass(slots=True)
class Ratio:
    """A ratio of two sums that forget: what was added n additions ago weighs ``keep`` ** n."""

    above: float
    below: float
    weight: float  # additions, weighed likewise; what it starts with counts as some
    keep: float

    def add(self, above: float, below: float) -> None:
        self.above = self.keep * self.above + above
        self.below = self.keep * self.below + below
        self.weight = self.keep * self.weight + 1

    def doubt(self, weight: float) -> None:
        """Let all that is known count for ``weight`` additions at most."""
        share = min(1.0, weight / self.weight)
        self.above, self.below, self.weight = self.above * share, self.below * share, self.weight * share

    @property
    def value(self) -> float:
        return self.above / self.below


def hope(ratio: Ratio, requests: int) -> float:
    """An optimistic reading of tokens per request over time, of cycles of so many requests."""
    tokens = ratio.above / ratio.weight  # of a cycle
    spread = SPREAD * sqrt(max(tokens - 1, 0.0)) / tokens
    return ratio.value * (1 + spread / sqrt(ratio.weight * requests))


@dataclass(slots=True)
class Switch:
    """Chooses before each cycle, and is told afterwards what the choice came to."""

    recent: Ratio = field(default_factory=lambda: Ratio(1.0, 1.0, 1.0, SHORT))  # of drafted cycles
    lasting: Ratio = field(default_factory=lambda: Ratio(1.0, 1.0, 1.0, LONG))  # of drafted cycles
    plain: Ratio = field(default_factory=lambda: Ratio(2.0, 2.0, 2.0, keep=0.9))  # at first as predicted
    trial: int = FIRST_TRIAL  # drafted cycles left before the next verdict
    lost: float = 0.0  # time, since drafting last had won as much
    pause: int = 0  # plain cycles left
    resuming: bool = False  # after a pause
    winning: bool = True  # was it, when it was last known; at first that is hoped
    peek: int = FIRST_PEEK  # drafted cycles left before a plain one
    next_peek: int = FIRST_PEEK

    def drafts(self) -> bool:
        """Whether the coming cycle drafts."""
        if self.pause:
            self.pause -= 1
            return False
        self.peek -= 1
        if self.peek >= 0:
            return True
        self.peek = self.next_peek = min(2 * self.next_peek, LONGEST_PEEK)
        return False

    def learn(self, drafted: bool, tokens: float, time: float, requests: int) -> bool:
        """``tokens`` per request; ``time`` in plain cycles, as predicted.

        Returns whether drafting has just been given up, after it had won or for the first time.
        """
        if not drafted:
            self.plain.add(tokens, time)
            return False
        self.lost = max(0.0, self.lost + time - tokens / self.plain.value)
        memories = self.recent, self.lasting
        if not self.resuming:  # that draft had the whole pause to read
            for ratio in memories:
                ratio.add(tokens, time)
        self.resuming = False
        self.trial = max(0, self.trial - 1)
        if self.trial == 0 and min(hope(ratio, requests) for ratio in memories) < self.plain.value:
            self._give_up()
            news, self.winning = self.winning, False
            return news
        if self.lasting.weight > SETTLED and self.lasting.value > self.plain.value:
            self.winning = True
        return False

    def _give_up(self) -> None:
        self.pause = round(min(max(self.lost / ALLOWED_LOSS, SHORTEST_PAUSE), LONGEST_PAUSE))
        self.lost, self.resuming = 0.0, True
        self.trial, self.peek = TRIAL, self.next_peek
        self.recent.doubt(TRIAL)
        self.lasting.doubt(TRIAL)
