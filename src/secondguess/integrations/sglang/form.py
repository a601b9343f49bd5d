"""A draft tree in the form that SGLang's verify pass takes. Pure functions, for any torch device.

R requests, N nodes (0 is the root).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.tree.layout import ancestors_or_self
from secondguess.types import DraftTree


@dataclass(frozen=True, slots=True)
class TreeForm:
    """Trees as SGLang's kernels walk them: a node's first child, then siblings one after the other; -1 ends a list.

    All int64. Nodes that pad a tree are in no list.
    """

    tokens_B: Tensor  # B = R N, request by request
    positions_B: Tensor
    rows_RN: Tensor  # where each node lies in the batch (SGLang's ``retrieve_index``)
    first_child_RN: Tensor  # ``retrieve_next_token``
    next_sibling_RN: Tensor  # ``retrieve_next_sibling``


def tree_form(tree: DraftTree, lengths_R: Tensor) -> TreeForm:
    """``lengths_R``: positions of each request that have K/V already; the root's is the next."""
    R, N = tree.tokens_RN.shape
    node_N = torch.arange(N, device=tree.tokens_RN.device)
    parents_RN = tree.parents_RN
    is_child_RNN = parents_RN[:, None] == node_N[:, None]  # (n, c): c is a child of n
    both_RNN = parents_RN[:, :, None] == parents_RN[:, None]
    is_later_RNN = both_RNN & (parents_RN >= 0)[:, None] & (node_N > node_N[:, None])  # (n, s): s is a sibling after n
    return TreeForm(
        tokens_B=tree.tokens_RN.flatten(),
        positions_B=(lengths_R[:, None] + tree.depths_RN).flatten(),
        rows_RN=torch.arange(R * N, device=node_N.device).view(R, N),
        first_child_RN=first(is_child_RNN),
        next_sibling_RN=first(is_later_RNN),
    )


def first(is_so_RNN: Tensor) -> Tensor:
    """int64 [R, N]: the first entry of each row that is True, -1 where none is."""
    found_RN, index_RN = is_so_RNN.max(2)  # of equal entries max takes the first
    return torch.where(found_RN, index_RN, -1)


def tree_mask(tree: DraftTree) -> Tensor:
    """bool [R N N]: which nodes each node sees, itself among them, request by request."""
    return ancestors_or_self(tree.parents_RN).flatten()


def full_mask(tree: DraftTree, lengths: Sequence[int]) -> Tensor:
    """bool, flat: of request after request N rows, over its ``lengths`` positions before the tree and its N nodes."""
    masks = [
        torch.cat([above_NN.new_ones(len(above_NN), length), above_NN], 1).flatten()
        for above_NN, length in zip(ancestors_or_self(tree.parents_RN), lengths, strict=True)
    ]
    return torch.cat(masks)
