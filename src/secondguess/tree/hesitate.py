"""Which nodes get a second look.

R requests, P nodes that wait for one, M nodes that get it in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondguess.config import Reconsider, TreeConfig
from secondguess.engine.noise import hash_words
from secondguess.tree.candidates import Candidates, Picks, depth_of, pack, token_of
from secondguess.tree.rows import Offers
from secondguess.tree.select import order_by


@dataclass(frozen=True, slots=True)
class Waiting:
    """Forwarded nodes, each fed by its own row as level 1 would be, and what they are ranked by."""

    picks: Picks  # not valid: padding, or has had its second look
    confidence_RP: Tensor
    doubt_RP: Tensor | None  # see ``Offers``
    left_R1: Tensor | None  # int64: second looks that a capped draft has left

    def take(self, chosen_RX: Tensor) -> Waiting:
        doubt_RX = None if self.doubt_RP is None else self.doubt_RP.gather(1, chosen_RX)
        return Waiting(self.picks.take(chosen_RX), self.confidence_RP.gather(1, chosen_RX), doubt_RX, self.left_R1)


def wait_at_root(root: Picks, offers: Offers, reconsider: Reconsider) -> Waiting:
    """The start of a draft: ``root`` [R, 1] waits, if it may."""
    cap, nobody_R0 = reconsider.reconsider_cap, root.nodes_RX[:, :0]
    left_R1 = None if cap is None else torch.full_like(root.nodes_RX, cap)
    waiting = Waiting(root, offers.confidence_RX, offers.doubt_RX, left_R1)
    return waiting if reconsider.root_eligible else waiting.take(nobody_R0)


def wait(before: Waiting, picks: Picks, offers: Offers, pool: str) -> Waiting:
    """Who waits after a forward whose first rows were those of ``picks``: these, or these and who waited ``before``."""
    count = picks.nodes_RX.shape[1]
    doubt_RX = None if offers.doubt_RX is None else offers.doubt_RX[:, :count]
    new = Waiting(picks, offers.confidence_RX[:, :count], doubt_RX, before.left_R1)
    if pool == "prev_batch":
        return new
    if doubt_RX is not None and before.doubt_RP is not None:
        doubt_RX = torch.cat((before.doubt_RP, doubt_RX), 1)
    confidence_RP = torch.cat((before.confidence_RP, new.confidence_RP), 1)
    return Waiting(before.picks.then(picks), confidence_RP, doubt_RX, before.left_R1)


def hesitate(pool: Candidates, waiting: Waiting, config: TreeConfig, step: int) -> tuple[Picks, Waiting]:
    """The nodes that are reconsidered in ``step`` (from 1 on), and who waits after that."""
    reconsider, picks = config.reconsider, waiting.picks
    count = allowed(config, step, waiting)
    if count == 0:
        return picks.take(picks.nodes_RX[:, :0]), waiting
    unsure_RP = picks.valid_RX & (waiting.confidence_RP <= reconsider.threshold)
    able = replace(waiting, picks=replace(picks, valid_RX=unsure_RP))
    chosen_RM = most_doubtful(pool, able, reconsider.select, count)
    hesitant = able.picks.take(chosen_RM)
    if waiting.left_R1 is not None:
        within_RM = torch.arange(chosen_RM.shape[1], device=chosen_RM.device) < waiting.left_R1
        hesitant = replace(hesitant, valid_RX=hesitant.valid_RX & within_RM)
        waiting = replace(waiting, left_R1=waiting.left_R1 - hesitant.valid_RX.sum(1, keepdim=True))
    if reconsider.pool == "any_unreconsidered":
        done_RP = torch.zeros_like(picks.valid_RX).scatter(1, chosen_RM, hesitant.valid_RX)
        waiting = replace(waiting, picks=replace(picks, valid_RX=picks.valid_RX & ~done_RP))
    return hesitant, waiting


def allowed(config: TreeConfig, step: int, waiting: Waiting) -> int:
    """The rows that level 1 takes in a step."""
    last = config.reconsider.reconsider_steps
    count = config.num_reconsider if last is None or step <= last else 0
    if waiting.left_R1 is not None:
        count = min(count, int(waiting.left_R1.max()))
    return min(count, waiting.picks.nodes_RX.shape[1])


def most_doubtful(pool: Candidates, waiting: Waiting, select: str, count: int) -> Tensor:
    """Indices [R, M] of the ``count`` most doubtful valid nodes, equal ones in the order of ``best_fresh``."""
    nodes_RP = waiting.picks.nodes_RX
    scores_RP, keys_RP = pool.scores_RC.gather(1, nodes_RP), pool.keys_RC.gather(1, nodes_RP)
    if select == "low_top1":
        doubt_RP = -waiting.confidence_RP
    elif select == "path":  # its logarithm
        doubt_RP = scores_RP + (-waiting.confidence_RP).log1p()
    elif select == "random":
        doubt_RP = shuffled(keys_RP, token_of(pool.keys_RC[:, 0]))
    else:
        assert waiting.doubt_RP is not None
        doubt_RP = waiting.doubt_RP
    doubt_RP = doubt_RP.masked_fill(~waiting.picks.valid_RX, -torch.inf)
    return order_by(-doubt_RP, -scores_RP, keys_RP)[:, :count]


def shuffled(keys_RP: Tensor, roots_R: Tensor) -> Tensor:
    """A hash of root token, depth and token. Not of the parent's index: that counts padding, which a batch adds."""
    zeros_R, zeros_RP = torch.zeros_like(roots_R), torch.zeros_like(keys_RP)
    return hash_words(roots_R, zeros_R, zeros_R, pack(depth_of(keys_RP), zeros_RP, token_of(keys_RP))).double()
