"""What the head makes of features: losses against the target, and what the drafter thinks of its own guess.

The only place that makes logits in training. X rows, T packed tokens, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.drafter.model import Drafter, full_precision
from secondguess.train import chunks
from secondguess.train.batch import Batch
from secondguess.train.losses import Loss, kl


@dataclass(frozen=True, slots=True)
class Reading:
    """Of X features. Only ``loss_X`` and ``drift_X`` have gradients."""

    loss_X: Tensor
    confidence_X: Tensor  # the drafter's own top-1 probability
    right_X: Tensor  # 1.0 where its best token, the first of equals, is the target's, else 0.0
    next_logp_X: Tensor  # log-prob of the text's next token, -inf if it cannot be offered
    kept_X: Tensor  # bool: the target's token can be offered: only such rows are trained
    drift_X: Tensor | None = None  # KL from a reference's distribution, if there is one


class Head:
    """The head of ``drafter`` over the tokens of one batch. ``reference``: a drafter with the same vocabulary."""

    def __init__(self, drafter: Drafter, batch: Batch, loss: Loss, reference: Drafter | None = None) -> None:
        self.drafter, self.batch, self.loss, self.reference = drafter, batch, loss, reference
        self.next_ids_T = draft_ids(drafter.target_ids, batch.tokens_T.roll(-1))
        self.known_TV = None
        if len(batch.hidden_TH) * len(batch.head_VH) <= chunks.CHUNK:
            self.known_TV = self.distribution(batch.hidden_TH)

    def read(self, f_XH: Tensor, at_X: Tensor, reference_XH: Tensor | None = None) -> Reading:
        """Features that stand after the tokens at packed indices ``at_X``; ``reference_XH``: the reference's there."""
        rows = (f_XH, at_X) if reference_XH is None else (f_XH, at_X, reference_XH)
        return Reading(*chunks.by_chunks(self.numbers, len(self.batch.head_VH), *rows))

    def numbers(self, f_XH: Tensor, at_X: Tensor, reference_XH: Tensor | None = None) -> tuple[Tensor, ...]:
        """The fields of a Reading."""
        logq_XV = full_precision(self.drafter.logits(f_XH)).log_softmax(dim=-1)
        loss_X = self.loss(logq_XV, self.target(at_X))
        with torch.no_grad():
            top_X, guess_X = logq_XV.max(dim=-1)
            next_X, best_X = self.next_ids_T[at_X], self.batch.best_T[at_X]
            right_X = (guess_X == best_X).to(logq_XV.dtype)
            known = (top_X.exp(), right_X, log_probs_of(next_X, logq_XV), self.batch.offered_T[at_X])
        if self.reference is None or reference_XH is None:
            return loss_X, *known
        with torch.no_grad():
            reference_XV = full_precision(self.reference.logits(reference_XH)).softmax(dim=-1)
        return loss_X, *known, kl(logq_XV, reference_XV)

    def target(self, at_X: Tensor) -> Tensor:
        """The target's distribution [X, V] after tokens, renormalised over the draft vocabulary."""
        if self.known_TV is not None:
            return self.known_TV[at_X]
        return self.distribution(self.batch.hidden_TH[at_X])

    def distribution(self, hidden_XH: Tensor) -> Tensor:
        return full_precision(hidden_XH @ self.batch.head_VH.T).softmax(dim=-1)


def log_probs_of(ids_X: Tensor, logq_XV: Tensor) -> Tensor:
    """[X]: of one token in each row, -inf for id -1."""
    return logq_XV.gather(1, ids_X.clamp(min=0)[:, None]).squeeze(1).masked_fill(ids_X < 0, -torch.inf)


def draft_ids(target_ids: Tensor, tokens_T: Tensor) -> Tensor:
    """int64 [T]: draft ids of target tokens, -1 outside the draft vocabulary. ``target_ids`` ascend."""
    ids_T = torch.searchsorted(target_ids, tokens_T).clamp(max=len(target_ids) - 1)
    return torch.where(target_ids[ids_T] == tokens_T, ids_T, -1)
