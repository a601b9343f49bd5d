"""Prompt lookup: the text's own repetitions as a training-free drafter."""

from __future__ import annotations

import torch

from secondguess.config import TreeConfig
from secondguess.device import upload
from secondguess.engine.speculate import Accepted, Prefix, Roots
from secondguess.types import DraftTree, Speculation, Verdict

MAX_NGRAM = 3


class Ngram:
    """Offers what followed earlier occurrences of the newest 3, 2 or 1 tokens: longer matches first, then newer ones.

    Continuations of up to ``num_steps`` tokens are merged into one tree until the budget is full (prompt lookup with
    a tree; the single newest match is its first path).
    """

    def __init__(self, config: TreeConfig) -> None:
        self.config = config

    def keeps(self, slot: int, speculation: Speculation, count: int) -> int:
        return count

    def admit(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        pass

    def draft(self, roots: Roots) -> DraftTree:
        tries = [self._trie(history) for history in roots.histories]
        size = max(map(len, tries))
        pad = [[0, -1, 0, 0]]
        table_RN4 = upload([trie + pad * (size - len(trie)) for trie in tries], roots.device)
        tokens_RN, parents_RN, depths_RN, valid_RN = table_RN4.unbind(-1)
        # No probabilities here; the order of entry stands in for a score.
        scores_RN = -torch.arange(size, dtype=torch.float32, device=roots.device).expand_as(tokens_RN)
        levels_RN, deepest = torch.zeros_like(tokens_RN), self.config.num_steps
        return DraftTree(tokens_RN, parents_RN, depths_RN, levels_RN, scores_RN, valid_RN == 1, deepest=deepest)

    def accept(self, accepted: list[Accepted]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def steps_for(self, slot: int) -> int:
        return 0

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        pass

    def _trie(self, history: list[int]) -> list[list[int]]:
        """Rows [token, parent, depth, 1] of the tree, the root first."""
        nodes, children = [[history[-1], -1, 0, 1]], {}
        for start in matches(history):
            parent = 0
            for depth, token in enumerate(history[start : start + self.config.num_steps], 1):
                if (parent, token) not in children:
                    if len(nodes) > self.config.max_budget:
                        return nodes
                    children[parent, token] = len(nodes)
                    nodes.append([token, parent, depth, 1])
                parent = children[parent, token]
        return nodes


def matches(history: list[int]) -> list[int]:
    """Indices that follow an earlier occurrence of the newest n tokens: n from 3 down to 1, the newest first."""
    found: dict[int, None] = {}
    for n in range(min(MAX_NGRAM, len(history) - 1), 0, -1):
        tail = history[-n:]
        for start in range(len(history) - 1, n - 1, -1):
            if history[start - n : start] == tail:
                found.setdefault(start)
    return list(found)
