"""Work with large matrices at the price of doing it twice, so that memory grows neither with rows x vocabulary nor with
rows x context. Small ones, which is what training on ordinary answers meets, cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Numbers of the largest matrix that is kept for the backward pass, 23 MB in float32: 2,048 rows of 2,816. Seven unroll
# steps of both levels keep up to three of them for each of 14 passes, and 2,048 tokens are to stay under 4 GB.
CHUNK = 11 * 2**19


def by_chunks(work: Callable[..., tuple[Tensor, ...]], width: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """``work(*rows)``, whose results have a row for each of the ``rows`` and whose matrices have ``width`` columns.

    As many rows at once as fill a chunk.
    """
    at_once = max(1, CHUNK // width)
    if len(rows[0]) <= at_once:
        return work(*rows)
    parts = zip(*(x.split(at_once) for x in rows), strict=True)
    done = [again_in_backward(work, *part) for part in parts]
    return tuple(torch.cat(results) for results in zip(*done, strict=True))


def again_in_backward(work: Callable[..., Any], *args: Tensor) -> Any:
    """``work(*args)``, of which nothing but the arguments and the results is kept."""
    return checkpoint(work, *args, use_reentrant=False, preserve_rng_state=False)
