"""What diagnosis needs to know of a replay: every position of greedy chains, every drafted node.

T tokens of a text, V vocabulary, R requests, D path length, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from secondguess.bench.chain import ChainSpeculator
from secondguess.bench.diagnosis import Nodes, Positions
from secondguess.bench.replay import Text, prefill, replay, text_of
from secondguess.bench.transcript import Transcript
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.speculate import GREEDY, Draw, Speculator
from secondguess.target.base import Target

T = TypeVar("T", Positions, Nodes)


def table(kind: type[T], rows: Sequence[tuple]) -> T:
    """Rows, one at least, as columns."""
    return kind(*map(np.array, zip(*rows, strict=True)))


@torch.no_grad()
def read_confident(target: Target, transcript: Transcript, draw: Draw = GREEDY) -> tuple[Text, list[float]]:
    """As ``read``, and the target's top-1 probability after each token of prompt and answer, at temperature 1."""
    out = prefill(target, transcript, last_only=False)
    logits_TV = out.logits_RNV[0].float()
    return text_of(transcript, draw, out), (logits_TV.amax(1) - logits_TV.logsumexp(1)).exp().tolist()


class Position(NamedTuple):
    """A row of ``Positions``."""

    confidence0: float
    confidence1: float
    target_confidence: float
    right0: bool
    right1: bool
    known: bool


def chain_positions(
    chain: ChainSpeculator, texts: Sequence[Text], confidences: Sequence[Sequence[float]]
) -> list[Position]:
    """Replay greedy chains. Of each, all positions up to and with the first rejected one, while the text lasts.

    A token of a text is met once, or not at all if it is the bonus token after a chain that is right to its end.
    ``confidences``: the target's, of each text.
    """
    newest = [t.num_prompt for t in texts]
    known = set(chain.drafter.target_ids.tolist())
    found: list[Position] = []

    def listen(running: Sequence[int], trace: CycleTrace) -> None:
        sure0, sure1 = chain.level0.confidence_RD.tolist(), chain.level1.confidence_RD.tolist()
        guesses1 = chain.level1.tokens_RD.tolist()
        truth, emitted = trace.verdict.tokens_RD.tolist(), trace.verdict.num_emitted_R.tolist()
        for r, i in enumerate(running):
            count = min(emitted[r], len(sure0[r]), texts[i].num_written - 1 - newest[i])
            for d in range(count):
                right0, right1 = d < emitted[r] - 1, guesses1[r][d] == truth[r][d]
                sure = confidences[i][newest[i] + d]
                found.append(Position(sure0[r][d], sure1[r][d], sure, right0, right1, truth[r][d] in known))
            newest[i] += emitted[r]

    replay(chain, texts, listen)
    return found


class Node(NamedTuple):
    """A row of ``Nodes``."""

    probability: float
    on_path: bool
    depth: int
    level: int


def tree_nodes(speculator: Speculator, texts: Sequence[Text]) -> list[Node]:
    """Replay trees: every node that was drafted, the roots left out."""
    found: list[Node] = []
    replay(speculator, texts, lambda _, trace: found.extend(nodes_of(trace)))
    return found


def nodes_of(trace: CycleTrace) -> list[Node]:
    tree, index_N = trace.tree, torch.arange(trace.tree.tokens_RN.shape[1], device=trace.tree.tokens_RN.device)
    on_path_RN = (trace.verdict.path_RD[..., None] == index_N).any(1)
    drafted_RN = tree.valid_RN & (tree.depths_RN > 0)
    columns_RN = (tree.scores_RN.exp(), on_path_RN, tree.depths_RN, tree.levels_RN)
    return [Node(*row) for row in zip(*(x_RN[drafted_RN].tolist() for x_RN in columns_RN), strict=True)]
