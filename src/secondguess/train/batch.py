"""Packed training sequences, and which of their rows are trained when.

Row p is "a draft that started at feature p": at step j it reads token p+1+j and predicts token p+2+j. Worked example,
6 tokens, 2 of them prompt (assistant turn = tokens 2..5):

    step 0 trains rows 1, 2, 3 (reading tokens 2, 3, 4; predicting 3, 4, 5)
    step 1 trains rows 1, 2    (reading tokens 3, 4;    predicting 4, 5)

Sequences are packed one after the other, without padding. T packed tokens, B sequences, X trained rows, L tapped
layers, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)  # no slots: ``spans`` is kept
class Batch:
    """Packed sequences, one assistant turn each."""

    tokens_T: Tensor  # int64
    taps_TLH: Tensor
    hidden_TH: Tensor  # the target's last hidden states, after its final norm
    head_VH: Tensor  # the target's output rows of the draft vocabulary
    best_T: Tensor  # int64: draft id of the target's most likely token there, -1 outside the draft vocabulary
    lengths_B: Tensor  # int64
    answer_starts_B: Tensor  # int64: index of the first assistant token, within its sequence

    @property
    def offered_T(self) -> Tensor:
        """bool [T]: where the drafter can offer the target's most likely token."""
        return self.best_T >= 0

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """First and past-the-last packed index of each token's own sequence, [T] each."""
        ends_B = self.lengths_B.cumsum(0)
        return self._by_token(ends_B - self.lengths_B), self._by_token(ends_B)

    @property
    def answer_starts_T(self) -> Tensor:
        return self._by_token(self.answer_starts_B)

    def _by_token(self, x_B: Tensor) -> Tensor:
        return x_B.repeat_interleave(self.lengths_B, output_size=len(self.tokens_T))


def start_rows(batch: Batch) -> Tensor:
    """Packed indices [X] of the rows trainable at step 0: answer start - 1 <= p <= length - 3."""
    start_T, end_T = batch.spans
    index_T = torch.arange(start_T.numel(), device=start_T.device)
    first_T = start_T + batch.answer_starts_T - 1
    return ((index_T >= first_T) & (index_T + 2 < end_T)).nonzero().squeeze(1)


def going_on(batch: Batch, rows_X: Tensor, step: int) -> Tensor:
    """bool [X]: the rows whose token to predict at this step is still in their sequence."""
    return rows_X + 2 + step < batch.spans[1][rows_X]


def trained_rows(batch: Batch, num_steps: int) -> Tensor:
    """int64 [num_steps]: rows of each unroll step that the loss is on, those whose target token can be offered."""
    rows_X, counts = start_rows(batch), []
    for step in range(num_steps):
        at_X = (rows_X + 1 + step).clamp(max=len(batch.tokens_T) - 1)
        counts.append((batch.offered_T[at_X] & going_on(batch, rows_X, step)).sum())
    return torch.stack(counts)
