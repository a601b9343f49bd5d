"""Losses of one unroll step, per row. X trained rows, V draft vocabulary, K most probable tokens.

p is the target's distribution (rows sum to 1, no gradient), q the drafter's, of which losses are given the logarithm:
the head takes it once for all that it says of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from secondguess.train.config import TrainConfig

Loss = Callable[[Tensor, Tensor], Tensor]  # logq_XV, target_XV -> [X]

LK_DECAY = 3.0


def soft_cross_entropy(logq_XV: Tensor, target_XV: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) per row [X]."""
    return -(target_XV * logq_XV).sum(dim=-1)


def kl(logq_XV: Tensor, target_XV: Tensor) -> Tensor:
    """KL(p || q): the soft cross-entropy less the entropy of p, so with its gradient."""
    return soft_cross_entropy(logq_XV, target_XV) + torch.xlogy(target_XV, target_XV).sum(dim=-1)


def overlap(logq_XV: Tensor, target_XV: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)): how often a token drawn from q would be accepted (arXiv 2211.17192)."""
    return torch.minimum(target_XV, logq_XV.exp()).sum(dim=-1)


def total_variation(logq_XV: Tensor, target_XV: Tensor) -> Tensor:
    """Half the sum of |p - q|, which is 1 less the overlap."""
    return 1 - overlap(logq_XV, target_XV)


def lk(logq_XV: Tensor, target_XV: Tensor) -> Tensor:
    """The adaptive LK loss (arXiv 2602.23881, its lambda form): w KL + (1 - w) TV with w = exp(-3 overlap), detached.

    Where p and q hardly overlap, TV has no gradient to speak of and KL leads; the more they do, the more it is the
    acceptance rate itself that is trained. Of the paper's two forms (the other is -log overlap) the one that it finds
    the better; the overlap is taken row by row.
    """
    accepted_X = overlap(logq_XV, target_XV)
    w_X = torch.exp(-LK_DECAY * accepted_X.detach())
    return w_X * kl(logq_XV, target_XV) + (1 - w_X) * (1 - accepted_X)


def top_k_cross_entropy(logq_XV: Tensor, target_XV: Tensor, k: int) -> Tensor:
    """HASS's (arXiv 2408.15766): -sum p(v) log q(v) over the k tokens with the largest p, which is not renormalised."""
    p_XK, best_XK = target_XV.topk(k, dim=-1)
    return -(p_XK * logq_XV.gather(-1, best_XK)).sum(dim=-1)


LOSSES: dict[str, Loss] = {"soft_ce": soft_cross_entropy, "kl": kl, "tv": total_variation, "lk": lk}


def loss_of(config: TrainConfig) -> Loss:
    """What a row costs, at both levels."""
    loss = LOSSES[config.loss]
    if not config.recipe.top_k_loss:
        return loss

    def with_top_k(logq_XV: Tensor, target_XV: Tensor) -> Tensor:
        top_k_X = top_k_cross_entropy(logq_XV, target_XV, config.top_k)
        return loss(logq_XV, target_XV) + config.top_k_weight * top_k_X

    return with_top_k


def level1_weight(confidence_X: Tensor, floor: float) -> Tensor:
    """[X]: doubt, plus a floor so that sure positions are not forgotten."""
    return 1 - confidence_X + floor


def spoilt(loss1_X: Tensor, loss0_X: Tensor) -> Tensor:
    """[X]: by how much a second look makes a first guess worse."""
    return torch.relu(loss1_X - loss0_X.detach())
