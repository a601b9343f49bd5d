"""What is known of batches of about one size and temperature: enough to choose how the next draft is made.

Tokens are those of one request, times are in plain cycles of the batch. K offered children.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from secondguess.engine.speculate import Draw
from secondguess.engine.switch import Ratio, Switch

EXPLORE = 16  # of so many drafts that could do without second looks one takes them, so that their use stays known
PROFILE_KEEP = 0.98


@dataclass(slots=True)
class Regime:
    """Statistics of the drafts so far; they start with a guess that a few drafts replace."""

    child_probs_K: np.ndarray  # of what a node offers, the best first
    switch: Switch = field(default_factory=Switch)
    # Tokens over time; the time is the predicted one, so that a slow moment of the machine does not count.
    pace: Ratio = field(default_factory=lambda: Ratio(1.0, 1.0, 1.0, keep=0.98))
    steps: Ratio = field(default_factory=lambda: Ratio(4.0, 1.0, 1.0, keep=0.98))  # of a draft
    refined: Ratio = field(default_factory=lambda: Ratio(4.0, 16.0, 16.0, keep=0.99))  # accepted in a draft that looks
    drafts_without_looks: int = 0  # since one looked

    @classmethod
    def new(cls, offer_width: int) -> Regime:
        return cls(2.0 ** -np.arange(1, offer_width + 1))

    @property
    def best_pace(self) -> float:
        """Tokens in a plain cycle's time: one can be had without drafting."""
        return max(self.pace.value, 1.0)

    def looks(self, extra_time: float) -> bool:
        """Whether the next draft takes second looks, which make each of its steps longer by ``extra_time``.

        They pay if level 1's accepted tokens outweigh those that the time would bring elsewhere. That is generous: some
        of what level 1 raised would have been accepted without.
        """
        pays = self.refined.value > self.best_pace * self.steps.value * extra_time
        self.drafts_without_looks += 1
        if pays or self.drafts_without_looks >= EXPLORE:
            self.drafts_without_looks = 0
            return True
        return False

    def offered(self, probs_K: np.ndarray) -> None:
        """Hear what the roots of a batch offered."""
        self.child_probs_K = PROFILE_KEEP * self.child_probs_K + (1 - PROFILE_KEEP) * probs_K


def warmth(draw: Draw) -> int:
    """Requests with the same one share statistics: greedy ones, and those sampled at about one temperature."""
    return 0 if draw.greedy else 1 + round(2 * draw.temperature)


def regime_key(warmths: list[int]) -> tuple[int, int]:
    """Batches of 1, 2, 3 to 4, 5 to 8, ... requests, by their mean warmth."""
    return (len(warmths) - 1).bit_length(), round(sum(warmths) / len(warmths))
