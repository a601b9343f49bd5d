"""Slow references in plain Python, written from the definitions and not from the tensor code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from secondguess.config import TreeConfig

ZERO = np.float32(0)


def sorted_tuple(features: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(features))


@dataclass(frozen=True)
class Look:
    """What one row of the drafter yields: its feature, and its offers."""

    feature: int
    children: tuple[tuple[int, np.float32], ...]  # (token, log-prob)
    confidence: float


UNSEEN = Look(-1, (), 0.0)  # of a node that has not been forwarded


@dataclass(frozen=True)
class Glance:
    """Everything that one row of the drafter depends on."""

    level: int
    token: int | None  # None: the self-query
    fed: int  # feature
    depth: int
    seen: tuple[int, ...]  # features of the rows that it sees, itself left out; sorted


Drafter = Callable[[Glance], Look]


@dataclass(eq=False)
class Node:
    token: int
    parent: Node | None
    born: int  # creation order
    logp: np.float32 = ZERO
    level: int = 0
    fed: int = -1
    look: Look = UNSEEN
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def score(self) -> np.float32:
        return ZERO if self.parent is None else np.float32(self.parent.score + self.logp)

    def above(self) -> list[Node]:
        return [] if self.parent is None else [*self.parent.above(), self.parent]

    def rank(self) -> tuple:
        return (-self.score, self.depth, self.parent.born if self.parent else -1, self.token)


class Grower:
    """The drafting loop of the design, on nodes that know their parents."""

    def __init__(self, config: TreeConfig, token: int, first: Look, drafter: Drafter) -> None:
        self.config, self.drafter = config, drafter
        self.root = Node(token, None, 0, look=first)
        self.nodes = [self.root]
        self.glances: list[list[Glance]] = []

    def offer(self, parent: Node, look: Look, level: int) -> list[Node]:
        """Add the children in ``look``; return those that it created or whose edge it won."""
        changed = []
        for token, logp in look.children:
            if logp == -math.inf:
                continue
            child = parent.children.get(token)
            if child is None:
                child = Node(token, parent, len(self.nodes), logp, level, look.feature)
                parent.children[token] = child
                self.nodes.append(child)
            elif logp > child.logp:
                child.logp, child.level = logp, level
                if child.look is UNSEEN:
                    child.fed = look.feature
            else:
                continue
            changed.append(child)
        return changed

    def run(self) -> list[Node]:
        new = self.offer(self.root, self.root.look, 0)
        prev = [self.root]
        for _ in range(1, self.config.num_steps):
            grown = sorted(new, key=Node.rank)[: self.config.grow_width]
            hesitant = sorted(prev, key=lambda n: (n.look.confidence, n.rank()))[: self.config.num_reconsider]
            new, prev = self.forward(grown, hesitant), grown
        return self.cut()

    def forward(self, grown: list[Node], hesitant: list[Node]) -> list[Node]:
        glances = []
        for node in grown:
            seen = sorted_tuple(a.look.feature for a in node.above())
            glances.append(Glance(0, node.token, node.fed, node.depth, seen))
        for node in hesitant:
            seen = sorted_tuple(a.look.feature for a in [*node.above(), node])
            glances.append(Glance(1, None, node.look.feature, node.depth, seen))
        looks = [self.drafter(g) for g in glances]
        self.glances.append(glances)
        for node, look in zip(grown, looks, strict=False):
            node.look = look
        new = []
        for node, look in zip(grown, looks, strict=False):
            new += self.offer(node, look, 0)
        for node, look in zip(hesitant, looks[len(grown) :], strict=True):
            new += [child for child in self.offer(node, look, 1) if child.look is UNSEEN]
        return new

    def cut(self) -> list[Node]:
        tree = [self.root]
        for _ in range(self.config.budget):
            able = [n for n in self.nodes if n.parent in tree and n not in tree]
            if able:
                tree.append(min(able, key=Node.rank))
        return sorted(tree, key=lambda n: n.born)


def eagle2_expansion(config: TreeConfig, token: int, first: Look, drafter: Drafter) -> list[tuple]:
    """EAGLE-2: keep a beam, offer everything, then take the best. Returns (token, parent, depth, score) per node."""
    tokens, parents, depths, scores = [token], [-1], [0], [ZERO]
    looks = {0: first}
    order = lambda i: (-scores[i], depths[i], parents[i], tokens[i])  # noqa: E731
    beam = [0]
    for step in range(config.num_steps):
        offered = []
        for i in beam:
            if step > 0:
                chain = [parents[i]]
                while parents[chain[-1]] >= 0:
                    chain.append(parents[chain[-1]])
                seen = sorted_tuple(looks[a].feature for a in chain)
                looks[i] = drafter(Glance(0, tokens[i], looks[parents[i]].feature, depths[i], seen))
            for t, logp in looks[i].children:
                if logp > -math.inf:
                    offered.append(len(tokens))
                    tokens.append(t)
                    parents.append(i)
                    depths.append(depths[i] + 1)
                    scores.append(np.float32(scores[i] + logp))
        beam = sorted(offered, key=order)[: config.grow_width]
    kept = [0, *sorted(sorted(range(1, len(tokens)), key=order)[: config.budget])]
    return [(tokens[i], kept.index(parents[i]) if i else -1, depths[i], scores[i]) for i in kept]


def ancestors_or_self(parents: list[int]) -> list[list[bool]]:
    def line(n: int) -> set[int]:
        return {n} if parents[n] < 0 else {n} | line(parents[n])

    return [[a in line(n) for a in range(len(parents))] for n in range(len(parents))]


def accepted_path(parents: list[int], tokens: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """The nodes walked from the root, and the tokens emitted: the last one is the first that no child carries."""
    children = {(p, t): n for n, (p, t) in enumerate(zip(parents, tokens, strict=True)) if p >= 0}
    path = [0]
    while (path[-1], chosen[path[-1]]) in children:
        path.append(children[path[-1], chosen[path[-1]]])
    return path, [chosen[n] for n in path]
