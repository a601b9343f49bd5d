"""Descending a draft tree along given tokens. R requests, N nodes, D = depth of the deepest node + 1."""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.types import DraftTree, Verdict


def child_with(tree: DraftTree, nodes_R: Tensor, tokens_R: Tensor) -> Tensor:
    """The child of ``nodes_R`` that carries ``tokens_R``; -1 when there is none, or when the node itself is -1."""
    match_RN = (tree.parents_RN == nodes_R[:, None]) & (tree.tokens_RN == tokens_R[:, None])
    found_R, child_R = match_RN.max(1)
    return torch.where(found_R & (nodes_R >= 0), child_R, -1)


def walk(tree: DraftTree, chosen_RN: Tensor) -> Verdict:
    """Descend from the root while a child carries the node's token; the first miss is the bonus token.

    ``chosen_RN`` (int64) is the target's token after every node.
    """
    node_R = torch.zeros_like(chosen_RN[:, 0])
    path, tokens = [], []
    for _ in range(int(tree.depths_RN.max()) + 1):
        token_R = chosen_RN.gather(1, node_R.clamp(min=0)[:, None])[:, 0]
        path.append(node_R)
        tokens.append(torch.where(node_R < 0, -1, token_R))
        node_R = child_with(tree, node_R, token_R)
    path_RD = torch.stack(path, 1)
    return Verdict(path_RD, torch.stack(tokens, 1), (path_RD >= 0).sum(1))
