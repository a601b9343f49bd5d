"""How often nodes with a given path score are accepted, learnt while decoding.

A drafter's path scores promise too much or too little, and by how much depends on the text and the temperature. The
counts forget, so that the map follows a change of text.

N nodes, B bins of path scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EDGES = -np.array([10, 8, 6, 5, 4, 3, 2.5, 2, 1.5, 1, 0.75, 0.5, 0.25, 0.125, 0.0625])
CENTRES_B = np.concatenate(([-12.0], (EDGES[1:] + EDGES[:-1]) / 2, [EDGES[-1] / 2]))
PRIOR = 2.0  # acceptances of each bin, as promised, that are taken for granted
KEEP = 0.998  # of the counts, from cycle to cycle


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Expected and actual acceptances by bins of path scores."""

    promised_B: np.ndarray  # sums of path probabilities
    kept_B: np.ndarray  # accepted nodes

    @classmethod
    def blank(cls) -> Calibration:
        """Takes path probabilities as they are."""
        return cls(np.zeros(len(CENTRES_B)), np.zeros(len(CENTRES_B)))

    def seen(self, scores_N: np.ndarray, accepted_N: np.ndarray) -> Calibration:
        """With the nodes of one more cycle, roots left out; ``accepted_N``: bool, 0 or 1."""
        bin_N = np.digitize(scores_N, EDGES)
        promised_B, kept_B = (
            np.bincount(bin_N, weight_N, len(CENTRES_B)) for weight_N in (np.exp(scores_N), accepted_N)
        )
        return Calibration(KEEP * self.promised_B + promised_B, KEEP * self.kept_B + kept_B)

    def offsets(self) -> np.ndarray:
        """[B]: what a path score at the centre of a bin lacks of the logarithm of the acceptance probability."""
        promised_B, kept_B = self.promised_B + PRIOR, self.kept_B + PRIOR
        return rising(CENTRES_B + np.log(kept_B / promised_B), promised_B) - CENTRES_B


def probability(scores: np.ndarray, offsets_B: np.ndarray) -> np.ndarray:
    """Acceptance probabilities of nodes with these path scores. A higher score never has a lower one."""
    return np.exp(np.minimum(scores + np.interp(scores, CENTRES_B, offsets_B), 0.0))


def rising(values_B: np.ndarray, weights_B: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence nearest to ``values_B`` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values_B, weights_B, strict=True):
        pool = (float(value), float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavier, length = pools.pop()
            total = heavier + pool[1]
            pool = ((mean * heavier + pool[0] * pool[1]) / total, total, length + pool[2])
        pools.append(pool)
    return np.concatenate([np.full(length, mean) for mean, _, length in pools])
