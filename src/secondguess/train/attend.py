"""What the rows of a pass attend to in training.

Draft p at step j sees the step-0 keys of rows 0..p of its sequence, and the keys of its own steps 1..j; level 1 sees
the same and itself. In positions of the text, where draft p stands at p + j: the target's features up to p, and what
the draft itself was fed at the newest j. These are the diagonals of HASS (arXiv 2408.15766) and of EAGLE-3's
training-time test (arXiv 2503.01840). The step whose key draft p = t - 2 sees at step 2, where it stands at t:

    position   0  1  2  3  4
    t = 2      0  1  2
    t = 3      0  0  1  2
    t = 4      0  0  0  1  2

T packed tokens, X rows, A / G heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from secondguess.drafter.model import full_precision
from secondguess.train.chunks import by_chunks

KeyValue = tuple[Tensor, Tensor]  # [X, G, D] each, or [T, G, D]
Piece = tuple[int, int, int]  # a sequence's first token, the one behind its last row, and its number of rows


@dataclass(frozen=True, slots=True)
class Seen:
    """The keys and values that drafts see, their newest pass not counted."""

    start_T: Tensor  # int64: where each token's sequence starts
    rows_X: Tensor  # int64, ascending: the drafts, as packed indices of the features that they started at
    last_X: Tensor  # int64: the newest step-0 key that each sees
    pieces: tuple[Piece, ...]  # of the sequences that have drafts, in order: asked of the device once for all layers
    shared: tuple[KeyValue, ...] = ()  # of step 0, by layer: of all tokens
    own: tuple[tuple[KeyValue, ...], ...] = ()  # of the steps after, by step and layer: of each draft

    @classmethod
    def begin(cls, start_T: Tensor, rows_X: Tensor) -> Seen:
        """At step 0, before there are keys."""
        return cls(start_T, rows_X, rows_X, pieces_of(start_T, rows_X))

    def take(self, chosen_Y: Tensor) -> Seen:
        """Of these drafts: int64, ascending."""
        own = tuple(tuple((k[chosen_Y], v[chosen_Y]) for k, v in step) for step in self.own)
        rows_Y, last_Y = self.rows_X[chosen_Y], self.last_X[chosen_Y]
        return replace(self, rows_X=rows_Y, last_X=last_Y, pieces=pieces_of(self.start_T, rows_Y), own=own)

    def then(self, newest: tuple[KeyValue, ...]) -> Seen:
        """With the pass that gave ``newest``, by layer."""
        return replace(self, own=(*self.own, newest))

    def without_newest(self) -> Seen:
        """Less the newest pass."""
        return replace(self, own=self.own[:-1]) if self.own else replace(self, last_X=self.last_X - 1)

    def own_of(self, layer: int) -> list[KeyValue]:
        return [step[layer] for step in self.own]


def pieces_of(start_T: Tensor, rows_X: Tensor) -> tuple[Piece, ...]:
    firsts, counts = start_T[rows_X].unique_consecutive(return_counts=True)
    lasts = rows_X[counts.cumsum(0) - 1] + 1
    return tuple((first, last, count) for first, last, count in torch.stack([firsts, lasts, counts], 1).tolist())


def attend(q_XAD: Tensor, shared: KeyValue, own: list[KeyValue], seen: Seen) -> Tensor:
    """Attention [X, A, D] of rows over step-0 keys of their sequence, and over their own (k, v) pairs.

    Rows come sequence by sequence, so each sequence is one dense product. R = A / G query heads of a group, N rows and
    S step-0 keys of one sequence, J own keys.
    """
    k_TGD, v_TGD = shared
    X, A, D = q_XAD.shape
    G = k_TGD.shape[1]
    q_XGRD = (q_XAD * D**-0.5).view(X, G, A // G, D)
    none_XG0D = q_XGRD[:, :, :0]
    k_XGJD = torch.stack([k for k, _ in own], dim=2) if own else none_XG0D
    v_XGJD = torch.stack([v for _, v in own], dim=2) if own else none_XG0D
    out, x = [], 0
    for first, last, count in seen.pieces:
        mine, keys = slice(x, x + count), slice(first, last)
        future_NS = torch.arange(first, last, device=q_XAD.device) > seen.last_X[mine, None]
        sequence = partial(attend_sequence, k_TGD[keys], v_TGD[keys])
        out += by_chunks(sequence, A * (last - first), q_XGRD[mine], k_XGJD[mine], v_XGJD[mine], future_NS)
        x += count
    return torch.cat(out)


def attend_sequence(
    k_SGD: Tensor, v_SGD: Tensor, q_NGRD: Tensor, k_NGJD: Tensor, v_NGJD: Tensor, future_NS: Tensor
) -> tuple[Tensor]:
    """Of rows of one sequence, [N, A, D]. Own keys are elementwise."""
    q_GRND = q_NGRD.permute(1, 2, 0, 3)
    k_G1DS, v_G1SD = k_SGD.permute(1, 2, 0)[:, None], v_SGD.transpose(0, 1)[:, None]
    k_G1NJD, v_G1NJD = (x_NGJD.transpose(0, 1)[:, None] for x_NGJD in (k_NGJD, v_NGJD))
    s_GRNS = q_GRND.matmul(k_G1DS).masked_fill(future_NS, float("-inf"))
    s_GRNJ = (q_GRND[..., None, :] * k_G1NJD).sum(dim=-1)
    w_GRN = full_precision(torch.cat([s_GRNS, s_GRNJ], dim=-1)).softmax(dim=-1).to(q_GRND.dtype)
    w_GRNS, w_GRNJ = w_GRN.split([s_GRNS.shape[-1], s_GRNJ.shape[-1]], dim=-1)
    o_GRND = w_GRNS.matmul(v_G1SD) + (w_GRNJ[..., None] * v_G1NJD).sum(dim=-2)
    return (o_GRND.permute(2, 0, 1, 3).flatten(1, 2),)
