"""Work over the whole vocabulary in parts, so that its memory does not grow with rows x vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 2**24  # numbers of one row-by-vocabulary matrix: 64 MB in float32


def by_chunks(work: Callable[..., tuple[Tensor, ...]], width: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """``work(*rows)``, whose results have a row for each of the ``rows`` and whose matrices have ``width`` columns.

    As many rows at once as fill a chunk. What is done in more than one part is done again in the backward pass, since
    keeping its matrices until then would spare nothing.
    """
    at_once = max(1, CHUNK // width)
    if len(rows[0]) <= at_once:
        return work(*rows)
    parts = zip(*(x.split(at_once) for x in rows), strict=True)
    done = [checkpoint(work, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return tuple(torch.cat(results) for results in zip(*done, strict=True))
