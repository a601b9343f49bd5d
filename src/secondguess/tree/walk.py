"""Descending a draft tree. R requests, N nodes, D = nodes of the longest accepted path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from secondguess import device
from secondguess.types import DraftTree, Verdict


def child_with(tree: DraftTree, nodes_R: Tensor, tokens_R: Tensor) -> Tensor:
    """The first child of ``nodes_R`` that carries ``tokens_R``; -1 when there is none, or the node itself is -1."""
    match_RN = (tree.parents_RN == nodes_R[:, None]) & (tree.tokens_RN == tokens_R[:, None])
    found_R, child_R = match_RN.max(1)  # of equal entries max takes the first
    return torch.where(found_R & (nodes_R >= 0), child_R, -1)


def longest_path(tree: DraftTree) -> int:
    """Nodes of the longest path that there can be."""
    num_nodes = tree.tokens_RN.shape[1]
    return num_nodes if tree.deepest is None else min(num_nodes, tree.deepest + 1)


def may_wait(tree: DraftTree) -> bool:
    """Whether to ask at each depth if a path goes on. A GPU does a few needless choices before it could answer."""
    return tree.deepest is None or device.at_hand(tree.tokens_RN)


def walk(tree: DraftTree, choose_at: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Descend from the root while a child carries the node's token; the first miss is the bonus token.

    ``choose_at(node_R, active_R)`` is the target's token after each node, int64 [R]; it is asked once per depth, and
    its answers in rows that are not active (bool) are ignored. Tokens are chosen as if there were no tree, so any tree
    with distinct siblings gives the tokens of plain decoding.
    """
    node_R = torch.zeros_like(tree.tokens_RN[:, 0])
    path, tokens = [], []
    for _ in range(longest_path(tree)):
        active_R = node_R >= 0
        if may_wait(tree) and not bool(active_R.any()):
            break
        token_R = choose_at(node_R.clamp(min=0), active_R)
        path.append(node_R)
        tokens.append(torch.where(active_R, token_R, -1))
        node_R = child_with(tree, node_R, token_R)
    path_RD = torch.stack(path, 1)
    return Verdict(path_RD, torch.stack(tokens, 1), (path_RD >= 0).sum(1))
