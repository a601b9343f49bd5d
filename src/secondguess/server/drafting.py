"""What a stream tells of its drafts if ``stream_options.drafting`` asks for it: the page's extension of the API."""

from __future__ import annotations

from math import exp
from typing import Any

from secondguess.engine.attribution import Attribution
from secondguess.engine.cycle import CycleTrace
from secondguess.server.shape import Shape
from secondguess.types import Delta


class Drafts:
    """Follows the choices of an answer: who wrote which characters, and every cycle's tree."""

    def __init__(self, shape: Shape) -> None:
        self.shape, llm = shape, shape.llm
        self.attributions = [Attribution(llm.target.tokenizer) for _ in shape.requests]
        methods = (llm.methods[request.speculation.method or llm.method.name] for request in shape.requests)
        self.has_drafter = [method.has_drafter for method in methods]

    def of(self, i: int, delta: Delta) -> dict[str, Any]:
        """What a delta adds to choice number ``i``."""
        pieces = [{"text": text, "origin": origin} for text, origin in self.attributions[i].split(delta)]
        return {"index": i, "pieces": pieces, "cycles": [self.cycle(i, trace) for trace in delta.cycles]}

    def cycle(self, i: int, trace: CycleTrace) -> dict[str, Any]:
        """Lists have an entry for each node of the tree, the root first."""
        tree, verdict = trace.tree, trace.verdict
        num_nodes, num_emitted = int(tree.valid_RN[0].sum()), int(verdict.num_emitted_R[0])
        parents, scores = tree.parents_RN[0, :num_nodes].tolist(), tree.scores_RN[0, :num_nodes].tolist()
        return {
            "tokens": [self.shape.token_text(token) for token in tree.tokens_RN[0, :num_nodes].tolist()],
            "parents": parents,
            "levels": tree.levels_RN[0, :num_nodes].tolist(),
            "probabilities": edges(parents, scores) if self.has_drafter[i] else [None] * num_nodes,
            "path": verdict.path_RD[0, :num_emitted].tolist(),
            "bonus": self.shape.token_text(int(verdict.tokens_RD[0, num_emitted - 1])),
        }


def edges(parents: list[int], scores: list[float]) -> list[float | None]:
    """The drafter's probability of each node after its parent; none of the root."""
    logps = (score - scores[parent] for parent, score in zip(parents[1:], scores[1:], strict=True))
    return [None, *(round(exp(min(logp, 0.0)), 4) for logp in logps)]
