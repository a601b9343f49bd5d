"""The reduced draft vocabulary: the tokens a target writes most, chosen by measured coverage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from secondguess.errors import UserError


def count_tokens(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Occurrences [vocab_size] (int64) of each token in answer tokens only (what the loss is on)."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab_size)
    return counts


def choose_vocab(counts: Tensor, size: int) -> Tensor:
    """The ``size`` most frequent target ids, ascending; ties and unseen tokens go to the lower id."""
    if size > counts.numel():
        raise UserError(f"draft_vocab_size {size} is larger than the target's vocabulary of {counts.numel()}: lower it")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def grow_vocab(counts: Tensor, target_ids: Tensor, size: int) -> Tensor:
    """The given target ids and the most frequent others, ``size`` in all, ascending."""
    ranks = counts.index_fill(0, target_ids, torch.iinfo(counts.dtype).max)
    return choose_vocab(ranks, size)


def coverage(counts: Tensor, target_ids: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary can offer."""
    return (counts[target_ids].sum() / counts.sum().clamp(min=1)).item()


def to_offsets(target_ids: Tensor) -> Tensor:
    """The checkpoint's ``d2t``: target id = draft id + offset."""
    return target_ids - torch.arange(target_ids.numel())


def from_offsets(d2t: Tensor) -> Tensor:
    return d2t + torch.arange(d2t.numel())


def target_to_draft(target_ids: Tensor, vocab_size: int) -> Tensor:
    """Inverse map [vocab_size] (int64), -1 where a target token is not in the draft vocabulary."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64)
    inverse[target_ids] = torch.arange(target_ids.numel())
    return inverse
