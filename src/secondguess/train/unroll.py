"""Training-time test (EAGLE-3, arXiv 2503.01840): every trained row drafts step by step, with the text's own tokens.

A draft's step j reads token p+1+j and the feature that its step j-1 yielded (``batch`` has an example). T packed
tokens, X drafts that go on, Y of them looked at again, H hidden, V draft vocabulary, A / G heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondguess.drafter.model import Drafter
from secondguess.train.attend import KeyValue, Seen, attend
from secondguess.train.batch import Batch, going_on, start_rows


@dataclass(frozen=True, slots=True)
class Drafts:
    """All drafts that have come as far as this step, after its level-0 pass."""

    step: int
    e_XH: Tensor  # what the pass read of the text
    f_XH: Tensor  # what it yielded
    position_X: Tensor  # int64, within their sequence: where the pass stood
    seen: Seen  # by now also what the pass added

    @property
    def at_X(self) -> Tensor:
        """Packed index of the token that the pass read: the target's state there is what it is taught."""
        return self.seen.rows_X + 1 + self.step


def begin(drafter: Drafter, batch: Batch) -> Drafts | None:
    """Step 0, with the target's features. None if no row can be trained.

    Keys are needed of all tokens, features of the last layer of the trained rows alone.
    """
    rows_X, (start_T, _) = start_rows(batch), batch.spans
    if not len(rows_X):
        return None
    every_T = torch.arange(len(start_T), device=start_T.device)
    position_T = every_T - start_T
    e_TH, y = drafter.embed(batch.tokens_T.roll(-1)), drafter.fuse(batch.taps_TLH)
    rotation = drafter.rotation(position_T)
    shared: list[KeyValue] = []
    last = Seen.begin(start_T, rows_X)
    others = Seen.begin(start_T, every_T) if len(drafter.blocks) > 1 else last
    for layer in drafter.blocks:
        seen = last if layer is drafter.blocks[-1] else others
        q_TAD, k_TGD, v_TGD = layer.project(e_TH, y, rotation)
        shared.append((k_TGD, v_TGD))
        attended = attend(q_TAD[seen.rows_X], shared[-1], [], seen)
        y = layer.finish(layer.residual(y[seen.rows_X]), attended)
    return Drafts(0, e_TH[rows_X], drafter.feature(y), position_T[rows_X], replace(last, shared=tuple(shared)))


def advance(drafter: Drafter, batch: Batch, drafts: Drafts, g_XH: Tensor) -> Drafts | None:
    """The next step of the drafts that have one, fed by ``g_XH``. None if no draft goes on."""
    step = drafts.step + 1
    alive_Y = going_on(batch, drafts.seen.rows_X, step).nonzero().squeeze(1)
    if not len(alive_Y):
        return None
    seen, position_X = drafts.seen.take(alive_Y), drafts.position_X[alive_Y] + 1
    e_XH = drafter.embed(batch.tokens_T[seen.rows_X + 1 + step])
    f_XH, newest = forward(drafter, e_XH, g_XH[alive_Y], position_X, seen)
    return Drafts(step, e_XH, f_XH, position_X, seen.then(newest))


def forward(
    drafter: Drafter, e_XH: Tensor, g_XH: Tensor, position_X: Tensor, seen: Seen
) -> tuple[Tensor, tuple[KeyValue, ...]]:
    """M over rows that see ``seen`` and themselves: their features, and their own keys and values by layer."""
    newest: list[KeyValue] = []

    def attend_own(layer: int, q_XAD: Tensor, k_XGD: Tensor, v_XGD: Tensor) -> Tensor:
        newest.append((k_XGD, v_XGD))
        return attend(q_XAD, seen.shared[layer], [*seen.own_of(layer), newest[layer]], seen)

    return drafter.block(e_XH, g_XH, position_X, attend_own), tuple(newest)


@torch.no_grad()
def level0(drafter: Drafter, batch: Batch) -> Iterator[Tensor]:
    """Level-0 features [X, H] of every step, each fed to the next one as it is."""
    drafts = begin(drafter, batch)
    while drafts is not None:
        yield drafts.f_XH
        drafts = advance(drafter, batch, drafts, drafts.f_XH)
