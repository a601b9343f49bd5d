"""Who is above whom in a tree. R requests, N nodes."""

from __future__ import annotations

import torch
from torch import Tensor


def ancestors_or_self(parents_RN: Tensor) -> Tensor:
    """bool [R, N, N]: entry (n, a) is True iff node a is node n or above it.

    ``parents_RN`` is int64, -1 at the root and at padding, which therefore have nobody above them.
    """
    num_nodes = parents_RN.shape[1]
    self_N = torch.arange(num_nodes, device=parents_RN.device)
    jump_RN = torch.where(parents_RN < 0, self_N, parents_RN)
    above_RNN = torch.eye(num_nodes, dtype=torch.bool, device=parents_RN.device).expand(len(parents_RN), -1, -1)
    for _ in range((num_nodes - 1).bit_length()):  # the distance covered doubles: 1, 3, 7, ... levels up
        above_RNN = above_RNN | above_RNN.take_along_dim(jump_RN[..., None], 1)
        jump_RN = jump_RN.gather(1, jump_RN)
    return above_RNN
