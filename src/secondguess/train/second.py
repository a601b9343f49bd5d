"""Second looks in training (level 1 of arXiv 2611.05724): which rows get one, and which go on from it.

X drafts at a step, Y of them looked at again, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondguess.config import SecondLook
from secondguess.drafter.look import ask
from secondguess.drafter.model import Drafter
from secondguess.train.chunks import by_chunks
from secondguess.train.head import Head, Reading
from secondguess.train.unroll import Drafts, forward


@dataclass(frozen=True, slots=True)
class Reconsider:
    """How level 1 is trained: on the most doubtful share ``rho``, with ``attach`` of its gradient into level 0."""

    rho: float
    attach: float
    carry: str
    seed: int
    look: SecondLook = field(default=SecondLook())


@dataclass(frozen=True, slots=True)
class Second:
    """Level 1 of a step. ``looked_Y`` (int64, ascending): the drafts that the rest is about."""

    looked_Y: Tensor
    f_YH: Tensor
    reading: Reading


def look_again(drafter: Drafter, head: Head, drafts: Drafts, first: Reading, reconsider: Reconsider) -> Second:
    """Send the features of the most doubtful rows through M once more."""
    looked_Y = most_doubtful(first, reconsider.rho).nonzero().squeeze(1)
    f_YH = second_features(drafter, drafts, looked_Y, reconsider)
    return Second(looked_Y, f_YH, head.read(f_YH, drafts.at_X[looked_Y]))


def second_features(drafter: Drafter, drafts: Drafts, looked_Y: Tensor, reconsider: Reconsider) -> Tensor:
    """f' [Y, H] = M(what ``ask`` makes of f), which sees what level 0 saw, level 0's own keys, and itself."""
    look, seen = reconsider.look, drafts.seen.take(looked_Y)
    f_YH = lean(drafts.f_XH[looked_Y], reconsider.attach)

    def asked(e_YH: Tensor, f_YH: Tensor) -> tuple[Tensor, Tensor]:
        return ask(drafter, look, e_YH, f_YH)

    e_YH, g_YH = by_chunks(asked, drafter.config.draft_vocab_size, drafts.e_XH[looked_Y], f_YH)
    position_Y = drafts.position_X[looked_Y] + (1 if look.query_rope == "next" else 0)
    seen = seen if look.see_own_level0 else seen.without_newest()
    return forward(drafter, e_YH, g_YH, position_Y, seen)[0]


def lean(f: Tensor, attach: float) -> Tensor:
    """Scale the gradient that level 1 sends into level 0."""
    return f if attach == 1 else attach * f + (1 - attach) * f.detach()


def most_doubtful(first: Reading, share: float) -> Tensor:
    """bool [X]: of the trained rows the ``share`` least confident. At least one row: where none is trained, any."""
    doubt_X = (1 - first.confidence_X).masked_fill(~first.kept_X, -1)
    order_X = doubt_X.argsort(descending=True, stable=True)
    rank_X = order_X.argsort()
    return rank_X < (share * first.kept_X.sum()).round().clamp(min=1)


def fed_back(f_XH: Tensor, first: Reading, second: Second, carry: str, coin: torch.Generator) -> Tensor:
    """What the next step starts from: level 1's feature where it is carried, else level 0's."""
    if carry == "off":
        return f_XH  # and no path for gradients, either
    carried_X = carried_rows(first, second, carry, coin)
    return f_XH.index_put((carried_X,), second.f_YH[carried_X[second.looked_Y]].to(f_XH.dtype))


def carried_rows(first: Reading, second: Second, carry: str, coin: torch.Generator) -> Tensor:
    """bool [X]: looked-at rows whose next step starts from level 1, all or: ``coin`` is tossed for ``half`` alone.

    ``half``: a random half of the more doubtful half. ``merge``: those where level 1 gives the text's next token, which
    the next step reads, more probability than level 0 does: then serving's merge would feed it from level 1, too.
    """
    looked_X = torch.zeros_like(first.kept_X).index_fill(0, second.looked_Y, True)
    if carry == "half":
        toss_X = torch.rand(len(looked_X), generator=coin).to(looked_X.device) < 0.5
        return looked_X & most_doubtful(first, 0.5) & toss_X
    if carry == "merge":
        better_Y = second.reading.next_logp_X > first.next_logp_X[second.looked_Y]
        return looked_X.index_put((second.looked_Y,), better_Y)
    return looked_X
