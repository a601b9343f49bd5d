"""Training-time test (EAGLE-3) with a reconsideration pass at every step.

Row p is "a draft that started at feature p": at step j it reads token p+1+j (ground truth, teacher forcing) and its own
feature of step j-1, and predicts token p+2+j. It sees step-0 keys of rows 0..p and its own keys of steps 1..j; level 1
sees the same plus itself. Worked example, 6 tokens, 2 of them prompt (assistant turn = tokens 2..5):

    step 0 trains rows 1, 2, 3 (reading tokens 2, 3, 4; predicting 3, 4, 5)
    step 1 trains rows 1, 2    (reading tokens 3, 4;    predicting 4, 5)

Sequences are packed one after the other, without padding. T packed tokens, B sequences, X trained rows, Y rows that get
a second look, L tapped layers, H hidden, V draft vocabulary, A / G heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.drafter.model import Drafter
from secondguess.train.losses import confidence

KeyValue = tuple[Tensor, Tensor]  # each [X, G, D]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed sequences, one assistant turn each."""

    tokens_T: Tensor  # int64
    taps_TLH: Tensor
    target_TV: Tensor  # the target's distribution after each token, renormalised over the draft vocabulary
    offered_T: Tensor  # bool: the target's most likely token there is in the draft vocabulary
    lengths_B: Tensor  # int64
    answer_starts_B: Tensor  # int64: index of the first assistant token, within its sequence


@dataclass(frozen=True, slots=True)
class Reconsider:
    """How level 1 is trained: on the most doubtful share ``rho``, with ``attach`` of its gradient into level 0."""

    rho: float
    attach: float
    carry: str
    seed: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one unroll step predicts. ``looked_X`` (bool) marks the rows that ``logits1_YV`` covers, in order."""

    logits0_XV: Tensor
    target_XV: Tensor
    offered_X: Tensor  # bool: only these rows are trained
    looked_X: Tensor
    logits1_YV: Tensor | None


def unroll(drafter: Drafter, batch: Batch, num_steps: int, reconsider: Reconsider | None) -> Iterator[Step]:
    """Yield up to ``num_steps`` steps; ``reconsider`` None is plain EAGLE-3.1."""
    start_T, end_T = spans(batch)
    position_T = torch.arange(batch.tokens_T.numel(), device=start_T.device) - start_T
    g_TH = drafter.fuse(batch.taps_TLH)
    q_TAD, k_TGD, v_TGD = drafter.project(drafter.embed(batch.tokens_T.roll(-1)), g_TH, position_T)
    rows_X = start_rows(batch)
    if not rows_X.numel():
        return
    g_XH, q_XAD = g_TH[rows_X], q_TAD[rows_X]
    own: list[KeyValue] = []
    coin = torch.Generator().manual_seed(reconsider.seed) if reconsider else None

    for j in range(num_steps):
        if j > 0:
            alive = rows_X + 2 + j < end_T[rows_X]
            rows_X, g_XH = rows_X[alive], g_XH[alive]
            own = [(k[alive], v[alive]) for k, v in own]
            if not rows_X.numel():
                return
            e_XH = drafter.embed(batch.tokens_T[rows_X + 1 + j])
            q_XAD, k_XGD, v_XGD = drafter.project(e_XH, g_XH, position_T[rows_X] + j)
            own.append((k_XGD, v_XGD))
        f_XH = drafter.finish(g_XH, attend(q_XAD, k_TGD, v_TGD, rows_X, start_T, own))
        logits_XV = full_precision(drafter.logits(f_XH))
        looked_X, logits1_YV, g_XH = torch.zeros_like(rows_X, dtype=torch.bool), None, f_XH

        if reconsider:
            doubt_X = 1 - confidence(logits_XV)
            looked_X = most_doubtful(doubt_X, reconsider.rho)
            own_Y = [(k[looked_X], v[looked_X]) for k, v in own]
            in_YH, rows_Y = lean(f_XH[looked_X], reconsider.attach), rows_X[looked_X]
            q_YAD, k_YGD, v_YGD = drafter.project(drafter.self_query.expand_as(in_YH), in_YH, position_T[rows_Y] + j)
            attended = attend(q_YAD, k_TGD, v_TGD, rows_Y, start_T, [*own_Y, (k_YGD, v_YGD)])
            f1_YH = drafter.finish(in_YH, attended)
            logits1_YV = full_precision(drafter.logits(f1_YH))
            carried_X = looked_X & carried_rows(doubt_X, reconsider.carry, coin)
            g_XH = f_XH.index_put((carried_X,), f1_YH[carried_X[looked_X]].to(f_XH.dtype))
        at_X = rows_X + 1 + j
        yield Step(logits_XV, batch.target_TV[at_X], batch.offered_T[at_X], looked_X, logits1_YV)


def spans(batch: Batch) -> tuple[Tensor, Tensor]:
    """First and past-the-last packed index of each token's own sequence, [T] each."""
    ends_B = batch.lengths_B.cumsum(0)
    return (ends_B - batch.lengths_B).repeat_interleave(batch.lengths_B), ends_B.repeat_interleave(batch.lengths_B)


def start_rows(batch: Batch) -> Tensor:
    """Packed indices [X] of the rows trainable at step 0: answer start - 1 <= p <= length - 3."""
    start_T, end_T = spans(batch)
    index_T = torch.arange(start_T.numel(), device=start_T.device)
    first_T = start_T + batch.answer_starts_B.repeat_interleave(batch.lengths_B) - 1
    return ((index_T >= first_T) & (index_T + 2 < end_T)).nonzero().squeeze(1)


def full_precision(x: Tensor) -> Tensor:
    """Soft-maxes are taken in float32 at least, whatever the products were computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def lean(f: Tensor, attach: float) -> Tensor:
    """Scale the gradient that level 1 sends into level 0."""
    return f if attach == 1 else attach * f + (1 - attach) * f.detach()


def most_doubtful(doubt_X: Tensor, share: float) -> Tensor:
    """bool [X]: the ``share`` least confident rows, at least one."""
    chosen = torch.zeros_like(doubt_X, dtype=torch.bool)
    chosen[doubt_X.topk(max(1, round(share * doubt_X.numel()))).indices] = True
    return chosen


def carried_rows(doubt_X: Tensor, carry: str, coin: torch.Generator | None) -> Tensor:
    """bool [X]: rows whose next step starts from level 1. ``half``: a random half of the more doubtful half."""
    if carry == "half":
        toss_X = torch.rand(doubt_X.numel(), generator=coin).to(doubt_X.device) < 0.5
        return most_doubtful(doubt_X, 0.5) & toss_X
    return torch.full_like(doubt_X, carry == "all", dtype=torch.bool)


def attend(q_XAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rows_X: Tensor, start_T: Tensor, own: list[KeyValue]) -> Tensor:
    """Attention of rows over step-0 keys of their own sequence up to themselves, and over their own (k, v) pairs.

    Rows come sequence by sequence, so each sequence is one dense product; own keys are elementwise. R = A / G query
    heads of a group, N rows and S step-0 keys of one sequence, J own keys. Returns [X, A, D].
    """
    X, A, D = q_XAD.shape
    G = k_TGD.shape[1]
    q_XGRD = (q_XAD * D**-0.5).view(X, G, A // G, D)
    none_XG0D = q_XGRD[:, :, :0]
    k_XGJD = torch.stack([k for k, _ in own], dim=2) if own else none_XG0D
    v_XGJD = torch.stack([v for _, v in own], dim=2) if own else none_XG0D
    firsts, counts = start_T[rows_X].unique_consecutive(return_counts=True)
    lasts = rows_X[counts.cumsum(0) - 1] + 1
    out, x = [], 0
    for first, last, count in zip(firsts.tolist(), lasts.tolist(), counts.tolist(), strict=True):
        mine = slice(x, x + count)
        q_GRND = q_XGRD[mine].permute(1, 2, 0, 3)
        k_G1DS, v_G1SD = k_TGD[first:last].permute(1, 2, 0)[:, None], v_TGD[first:last].transpose(0, 1)[:, None]
        k_G1NJD, v_G1NJD = (x_XGJD[mine].transpose(0, 1)[:, None] for x_XGJD in (k_XGJD, v_XGJD))
        future_NS = torch.arange(first, last, device=rows_X.device) > rows_X[mine, None]
        s_GRNS = q_GRND.matmul(k_G1DS).masked_fill(future_NS, float("-inf"))
        s_GRNJ = (q_GRND[..., None, :] * k_G1NJD).sum(dim=-1)
        w_GRN = full_precision(torch.cat([s_GRNS, s_GRNJ], dim=-1)).softmax(dim=-1).to(q_GRND.dtype)
        w_GRNS, w_GRNJ = w_GRN.split([last - first, s_GRNJ.shape[-1]], dim=-1)
        o_GRND = w_GRNS.matmul(v_G1SD) + (w_GRNJ[..., None] * v_G1NJD).sum(dim=-2)
        out.append(o_GRND.permute(2, 0, 1, 3).reshape(count, A, D))
        x += count
    return torch.cat(out)
