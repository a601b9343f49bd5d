"""Losses of one unroll step, per row. X trained rows, V draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(logits_XV: Tensor, target_XV: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) per row [X]; target rows sum to 1. Written so that log q is never materialised."""
    return logits_XV.logsumexp(dim=-1) - (target_XV * logits_XV).sum(dim=-1)


def confidence(logits_XV: Tensor) -> Tensor:
    """The drafter's own top-1 probability [X], detached."""
    with torch.no_grad():
        return torch.exp(logits_XV.amax(dim=-1) - logits_XV.logsumexp(dim=-1))


def agreement(logits_XV: Tensor, target_XV: Tensor) -> Tensor:
    """1.0 where the drafter's best token is the target's [X]."""
    with torch.no_grad():
        return (logits_XV.argmax(dim=-1) == target_XV.argmax(dim=-1)).float()


def balance_floor(confidence_X: Tensor, beta: float) -> Tensor:
    """Level-1 weights [X]: uncertainty plus a floor, so that sure positions are not forgotten."""
    return 1 - confidence_X + beta


def balance_hinge(loss1_X: Tensor, loss0_X: Tensor) -> Tensor:
    """Penalty [X] where a second look spoils a better first guess."""
    return torch.relu(loss1_X - loss0_X.detach())
