"""Random training batches for tiny drafters, unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.drafter.model import Drafter
from secondguess.target.hf import HFTarget
from secondguess.train.batch import Batch
from secondguess.train.head import Head
from secondguess.train.losses import soft_cross_entropy
from secondguess.train.objective import Step, objectives, steps
from secondguess.train.second import Reconsider
from secondguess.train.tally import Tally

EVERY_ROW = Reconsider(rho=1.0, attach=1.0, carry="off", seed=0)


def random_batch(
    target: HFTarget,
    drafter: Drafter,
    lengths: Sequence[int] = (7, 5),
    starts: Sequence[int] = (2, 3),
    seed: int = 0,
    offered: float = 0.8,
) -> Batch:
    """``offered``: the share of tokens that the drafter can offer."""
    g, total, spec = torch.Generator().manual_seed(seed), sum(lengths), target.spec
    tokens_T = torch.randint(spec.vocab_size, (total,), generator=g)
    taps_TLH = torch.randn(total, 3, spec.hidden_size, generator=g, dtype=torch.float64)
    hidden_TH = torch.randn(total, 8, generator=g, dtype=torch.float64)
    head_VH = torch.randn(len(drafter.target_ids), 8, generator=g, dtype=torch.float64)
    offered_T = torch.rand(total, generator=g) < offered
    return Batch(
        tokens_T=tokens_T,
        taps_TLH=taps_TLH,
        hidden_TH=hidden_TH,
        head_VH=head_VH,
        best_T=(hidden_TH @ head_VH.T).argmax(-1).where(offered_T, -1),
        lengths_B=torch.tensor(lengths),
        answer_starts_B=torch.tensor(starts),
    )


def unrolled(
    drafter: Drafter, batch: Batch, num_steps: int, reconsider: Reconsider | None = None, through_time: bool = True
) -> list[Step]:
    head = Head(drafter, batch, soft_cross_entropy)
    return list(steps(drafter, head, num_steps, reconsider, through_time))


def second_features(step: Step) -> Tensor:
    assert step.second is not None
    return step.second.f_YH


def objective(*args: Any, **kwargs: Any) -> tuple[Tensor, Tally]:
    """``objectives`` added up, and what they were made of."""
    level0, level1, sums_TF = objectives(*args, **kwargs)
    return level0 + level1, Tally.of(sums_TF)


def gradients(drafter: Drafter, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter, zero where the loss does not depend on it."""
    drafter.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters()}
    return {name: torch.zeros(()) if grad is None else grad.clone() for name, grad in found.items()}
