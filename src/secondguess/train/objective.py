"""The objective of one step (DESIGN 5): the losses of both levels at every unroll step, and the balance term.

    L = sum_j step_decay^j (L0_j + lambda L1_j + beta balance_j)

L0_j is the mean loss of level 0 over the trained rows, L1_j the sum of w_p times level 1's loss over the rows looked
at again, over the number of trained rows; w_p = 1 - c_p, the drafter's doubt. X rows of a step, Y looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from secondguess.drafter.model import Drafter
from secondguess.train.anchor import Anchor
from secondguess.train.batch import Batch
from secondguess.train.config import TrainConfig
from secondguess.train.head import Head, Reading
from secondguess.train.losses import level1_weight, loss_of, spoilt
from secondguess.train.second import Reconsider, Second, fed_back, look_again
from secondguess.train.tally import NAMES, nothing
from secondguess.train.unroll import Drafts, advance, begin, level0


@dataclass(frozen=True, slots=True)
class Step:
    """What one unroll step predicts."""

    drafts: Drafts
    first: Reading
    second: Second | None


def reconsider_of(config: TrainConfig, step: int) -> Reconsider | None:
    """Level-1 settings of a step; the coin that decides carrying depends on (seed, step) alone, so that runs resume."""
    look = config.second_look
    if look is None:
        return None
    seed = config.seed * 1_000_003 + step
    return Reconsider(config.rho, config.attach, config.carry, seed, look)


def steps(
    drafter: Drafter, head: Head, num_steps: int, reconsider: Reconsider | None, through_time: bool = True
) -> Iterator[Step]:
    """Yield up to ``num_steps`` steps of the head's batch; ``reconsider`` None is plain EAGLE-3.1."""
    batch, reference = head.batch, head.reference
    references = repeat(None) if reference is None else level0(reference, batch)
    coin = torch.Generator().manual_seed(reconsider.seed if reconsider else 0)
    drafts = begin(drafter, batch)
    while drafts is not None:
        first, second, g_XH = head.read(drafts.f_XH, drafts.at_X, next(references)), None, drafts.f_XH
        if reconsider:
            second = look_again(drafter, head, drafts, first, reconsider)
            g_XH = fed_back(drafts.f_XH, first, second, reconsider.carry, coin)
        yield Step(drafts, first, second)
        last = drafts.step + 1 == num_steps
        drafts = None if last else advance(drafter, batch, drafts, g_XH if through_time else g_XH.detach())


def objectives(
    drafter: Drafter,
    batch: Batch,
    config: TrainConfig,
    reconsider: Reconsider | None,
    step_rows: Sequence[float] | None = None,
    anchor: Anchor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each level, and what they were made of (``sums_TF``, see ``tally``).

    ``step_rows``: trained rows per unroll step of all the batches whose losses are added up; by default of this one.
    """
    level0 = level1 = batch.taps_TLH.new_zeros((), dtype=torch.float32)
    sums_TF = nothing(config.unroll_steps, batch.taps_TLH.device)
    head = Head(drafter, batch, loss_of(config), anchor.reference if anchor else None)
    for j, step in enumerate(steps(drafter, head, config.unroll_steps, reconsider, config.recipe.through_time)):
        rows = max(1, step_rows[j]) if step_rows else step.first.kept_X.sum().clamp(min=1)
        weight = config.step_decay**j / rows
        level0 = level0 + weight * level0_loss(step, config)
        level1 = level1 + weight * level1_loss(step, config)
        sums_TF[j] = count(step)
    return level0, level1, sums_TF


def level0_loss(step: Step, config: TrainConfig) -> Tensor:
    """Sum over the trained rows of an unroll step."""
    loss_X = step.first.loss_X
    if step.first.drift_X is not None:
        loss_X = loss_X + config.balance_weight * step.first.drift_X
    return (loss_X * step.first.kept_X).sum()


def level1_loss(step: Step, config: TrainConfig) -> Tensor:
    """Sum over the trained rows of an unroll step that got a second look; 0 where there is none."""
    if step.second is None:
        return step.first.loss_X.new_zeros(())
    return (level1_losses(step.first, step.second, config) * step.first.kept_X[step.second.looked_Y]).sum()


def level1_losses(first: Reading, second: Second, config: TrainConfig) -> Tensor:
    """[Y]: lambda w_p times level 1's loss, and the balance terms that lie there."""
    beta, loss1_Y = config.balance_weight, second.reading.loss_X
    w_Y = level1_weight(first.confidence_X[second.looked_Y], beta if config.balance == "floor" else 0.0)
    loss_Y = config.level1_weight * w_Y * loss1_Y
    if config.balance == "hinge":
        loss_Y = loss_Y + beta * spoilt(loss1_Y, first.loss_X[second.looked_Y])
    return loss_Y


@torch.no_grad()
def count(step: Step) -> Tensor:
    """float64 [F]: the fields of ``Tally``."""
    first, second, kept_X = step.first, step.second, step.first.kept_X
    sums = {"rows": kept_X.sum(), "loss0": (kept_X * first.loss_X).sum(), "right0": (kept_X * first.right_X).sum()}
    if first.drift_X is not None:
        sums["drift"] = (kept_X * first.drift_X).sum()
    if second is not None:
        kept_Y, right0_Y, right1_Y = kept_X[second.looked_Y], first.right_X[second.looked_Y], second.reading.right_X
        sums["looked"], sums["loss1"] = kept_Y.sum(), (kept_Y * second.reading.loss_X).sum()
        sums["right1"] = (kept_Y * right1_Y).sum()
        sums["broken"] = (kept_Y * right0_Y * (1 - right1_Y)).sum()
        sums["mended"] = (kept_Y * (1 - right0_Y) * right1_Y).sum()
    zero = torch.zeros((), dtype=torch.float64, device=kept_X.device)
    return torch.stack([sums.get(name, zero).double() for name in NAMES])
