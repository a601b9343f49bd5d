"""One branch of a draft tree, for verifiers that take chains. R requests, N tree nodes (0 is the root)."""

from __future__ import annotations

import torch

from secondguess.tree.layout import ancestors_or_self
from secondguess.types import DraftTree


def best_branch(tree: DraftTree, num_tokens: int) -> list[list[int]]:
    """Tokens below the root of the branch of which most are expected to be accepted, ``num_tokens`` at most.

    A node is accepted with the probability of its path, so a branch is worth the sum of these over its nodes. Of equal
    branches the first is taken, which is the shortest.
    """
    above_RNN = ancestors_or_self(tree.parents_RN)
    worth_RN = (above_RNN * tree.scores_RN.exp()[:, None]).sum(2)
    worth_RN = worth_RN.masked_fill(~tree.valid_RN | (tree.depths_RN > num_tokens), -torch.inf)
    branch_RN = above_RNN.take_along_dim(worth_RN.argmax(1)[:, None, None], 1)[:, 0]
    # Parents come before children, so a branch is in order; its first node is the root.
    return [tokens_N[on_N].tolist()[1:] for tokens_N, on_N in zip(tree.tokens_RN, branch_RN, strict=True)]
