"""The objective of one step: level 0's soft cross-entropy, level 1's, and the balance term (DESIGN 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondguess.drafter.model import Drafter
from secondguess.train.config import TrainConfig
from secondguess.train.losses import agreement, balance_floor, balance_hinge, confidence, soft_cross_entropy
from secondguess.train.unroll import Batch, Reconsider, Step, unroll


@dataclass(slots=True)
class Tally:
    """Sums over trained rows, per unroll step; level 1's are over the rows that got a second look."""

    rows: list[float] = field(default_factory=list)
    loss0: list[float] = field(default_factory=list)
    right0: list[float] = field(default_factory=list)
    looked: list[float] = field(default_factory=list)
    loss1: list[float] = field(default_factory=list)
    right1: list[float] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)  # level 0 right, level 1 wrong
    mended: list[float] = field(default_factory=list)  # level 0 wrong, level 1 right

    def append(self, step: Tally) -> None:
        """Put the tally of one more unroll step behind."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(step, name))

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            ours, theirs = getattr(self, name), getattr(other, name)
            ours.extend([0.0] * (len(theirs) - len(ours)))
            for j, value in enumerate(theirs):
                ours[j] += value

    def summary(self) -> dict[str, list[float]]:
        """Means per unroll step."""
        out = {"loss0": ratio(self.loss0, self.rows), "top1_0": ratio(self.right0, self.rows)}
        if any(self.looked):
            wrong0 = [n - r for n, r in zip(self.looked, self.right0_looked(), strict=True)]
            out |= {
                "loss1": ratio(self.loss1, self.looked),
                "top1_1": ratio(self.right1, self.looked),
                "top1_0_looked": ratio(self.right0_looked(), self.looked),
                "recovered": ratio(self.mended, wrong0),
                "broken": ratio(self.broken, self.right0_looked()),
            }
        return out

    def right0_looked(self) -> list[float]:
        return [r1 - m + b for r1, m, b in zip(self.right1, self.mended, self.broken, strict=True)]


def ratio(numerators: list[float], denominators: list[float]) -> list[float]:
    return [round(n / max(d, 1), 5) for n, d in zip(numerators, denominators, strict=True)]


def reconsider_of(config: TrainConfig, step: int) -> Reconsider | None:
    """Level-1 settings of a step; the coin that decides carrying depends on (seed, step) alone, so that runs resume."""
    if config.method == "eagle3.1":
        return None
    seed = config.seed * 1_000_003 + step
    return Reconsider(rho=config.rho, attach=config.attach, carry=config.carry, seed=seed)


def objective(
    drafter: Drafter,
    batch: Batch,
    config: TrainConfig,
    reconsider: Reconsider | None,
    step_rows: Sequence[float] | None = None,
) -> tuple[Tensor, Tally]:
    """Loss to minimise and what it was made of: sum_j decay^j (L0_j + lambda L1_j + beta balance_j).

    ``step_rows``: trained rows per unroll step of all the batches whose losses are added up; by default of this one.
    """
    total, tally = batch.taps_TLH.new_zeros((), dtype=torch.float32), Tally()
    for j, step in enumerate(unroll(drafter, batch, config.unroll_steps, reconsider)):
        weight = config.step_decay**j
        kept_X = step.offered_X
        loss0_X = soft_cross_entropy(step.logits0_XV, step.target_XV)
        rows = max(1, step_rows[j]) if step_rows else kept_X.sum().clamp(min=1)
        total = total + weight * (loss0_X * kept_X).sum() / rows
        if step.logits1_YV is not None:
            total = total + weight * level1_loss(step, loss0_X, config) / rows
        tally.append(count(step, loss0_X))
    return total, tally


def level1_loss(step: Step, loss0_X: Tensor, config: TrainConfig) -> Tensor:
    """Sum over rows of (1 - c) times level 1's soft cross-entropy, and the balance term."""
    assert step.logits1_YV is not None
    kept_Y, target_YV = step.offered_X[step.looked_X], step.target_XV[step.looked_X]
    loss1_Y = soft_cross_entropy(step.logits1_YV, target_YV)
    floor = config.balance_weight if config.balance == "floor" else 0.0
    weight_Y = balance_floor(confidence(step.logits0_XV)[step.looked_X], floor)
    loss_Y = config.level1_weight * weight_Y * loss1_Y
    if config.balance == "hinge":
        loss_Y = loss_Y + config.balance_weight * balance_hinge(loss1_Y, loss0_X[step.looked_X])
    return (loss_Y * kept_Y).sum()


@torch.no_grad()
def count(step: Step, loss0_X: Tensor) -> Tally:
    kept_X = step.offered_X.float()
    right0_X = agreement(step.logits0_XV, step.target_XV)
    tally = Tally([kept_X.sum().item()], [(loss0_X * kept_X).sum().item()], [(right0_X * kept_X).sum().item()])
    if step.logits1_YV is not None:
        kept_Y, target_YV = kept_X[step.looked_X], step.target_XV[step.looked_X]
        right0_Y, right1_Y = right0_X[step.looked_X], agreement(step.logits1_YV, target_YV)
        tally.looked = [kept_Y.sum().item()]
        tally.loss1 = [(soft_cross_entropy(step.logits1_YV, target_YV) * kept_Y).sum().item()]
        tally.right1 = [(right1_Y * kept_Y).sum().item()]
        tally.broken = [(right0_Y * (1 - right1_Y) * kept_Y).sum().item()]
        tally.mended = [((1 - right0_Y) * right1_Y * kept_Y).sum().item()]
    return tally
