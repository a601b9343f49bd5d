"""Slow references in plain Python, written from the definitions and not from the tensor code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from secondguess.config import TreeConfig
from test_noise import word as noise_word

ZERO = np.float32(0)


def sorted_tuple(features: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(features))


@dataclass(frozen=True)
class Look:
    """What one row of the drafter yields: its feature, and its offers."""

    feature: int
    children: tuple[tuple[int, np.float32], ...]  # (token, log-prob)
    confidence: float
    doubt: float = 0.0  # its entropy or margin, say
    ranking: tuple[tuple[int, np.float32], ...] = ()  # of all tokens, best first; ``children`` are its first


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
    pinned: np.float32 | None = None  # the path score, if it does not follow the edges above
    children: list[Node] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def score(self) -> np.float32:
        if self.pinned is not None:
            return self.pinned
        return ZERO if self.parent is None else np.float32(self.parent.score + self.logp)

    def above(self) -> list[Node]:
        return [] if self.parent is None else [*self.parent.above(), self.parent]

    def rank(self) -> tuple:
        return (-self.score, self.depth, self.parent.born if self.parent else -1, self.token)


class Grower:
    """The drafting loop of the design, on nodes that know their parents."""

    def __init__(self, config: TreeConfig, token: int, first: Look, drafter: Drafter) -> None:
        self.config, self.switches, self.drafter = config, config.reconsider, drafter
        self.root = Node(token, None, 0, look=first)
        self.nodes = [self.root]
        self.scores: dict[Node, np.float32] = {self.root: ZERO}  # before the step
        self.glances: list[list[Glance]] = []
        self.num_reconsidered = 0

    def run(self) -> list[Node]:
        new = self.offer(self.root, self.root.look)
        prev, waiting = [self.root], [self.root] if self.switches.root_eligible else []
        for step in range(1, self.config.num_steps):
            grown = sorted(new, key=Node.rank)[: self.config.grow_width]
            grown += self.more_children(prev, grown)
            hesitant = self.hesitant(waiting, step)
            new, prev = self.forward(grown, hesitant), grown
            any_ = self.switches.pool == "any_unreconsidered"
            waiting = [n for n in waiting if any_ and n not in hesitant] + grown
        return self.cut()

    def more_children(self, prev: list[Node], grown: list[Node]) -> list[Node]:
        """Of the least confident nodes of the previous batch the best child that nobody has forwarded."""
        best = {}
        for node in prev:
            if waiting := [c for c in node.children if c.look is UNSEEN and c not in grown]:
                best[node] = min(waiting, key=Node.rank)
        chosen = sorted(best, key=lambda n: (n.look.confidence, n.rank()))
        return [best[n] for n in chosen[: self.config.extra_advance]]

    def hesitant(self, waiting: list[Node], step: int) -> list[Node]:
        s = self.switches
        if s.reconsider_steps is not None and step > s.reconsider_steps:
            return []
        unsure = [n for n in waiting if n.look.confidence <= s.threshold]
        room = self.config.num_reconsider
        if s.reconsider_cap is not None:
            room = min(room, s.reconsider_cap - self.num_reconsidered)
        chosen = sorted(unsure, key=lambda n: (-self.doubt(n), n.rank()))[:room]
        self.num_reconsidered += len(chosen)
        return chosen

    def doubt(self, node: Node) -> float:
        look = node.look
        match self.switches.select:
            case "low_top1":
                return -look.confidence
            case "path":
                return float(node.score + np.log1p(np.float32(-look.confidence)))
            case "random":
                word = noise_word(self.root.token, 0, 0, (node.depth << 52) + node.token)
                return float(word - 2**64 if word >= 2**63 else word)
            case _:
                return look.doubt

    def forward(self, grown: list[Node], hesitant: list[Node]) -> list[Node]:
        glances = []
        for node in grown:
            seen = sorted_tuple(a.look.feature for a in node.above())
            glances.append(Glance(0, node.token, node.fed, node.depth, seen))
        for node in hesitant:
            own = [node] if self.switches.see_own_level0 else []
            seen = sorted_tuple(a.look.feature for a in [*node.above(), *own])
            glances.append(Glance(1, None, node.look.feature, node.depth, seen))
        looks = [self.drafter(g) for g in glances]
        self.glances.append(glances)
        self.scores = {node: node.score for node in self.nodes}
        for node, look in zip(grown, looks, strict=False):
            node.look = look
        new = []
        for node, look in zip(grown, looks, strict=False):
            new += self.offer(node, look)
        for node, look in zip(hesitant, looks[len(grown) :], strict=True):
            new += self.offer_again(node, look)
        return new

    def offer(self, parent: Node, look: Look) -> list[Node]:
        """The children of a level-0 look."""
        return [self.create(parent, t, logp, 0, look.feature) for t, logp in look.children if logp > -math.inf]

    def offer_again(self, parent: Node, look: Look) -> list[Node]:
        """What a level-1 look does to the children of its node; returns those that may be grown next."""
        s = self.switches
        feature = look.feature if s.child_feature == "level1" else parent.look.feature
        known = {token for token, _ in parent.look.children}
        offered = list(look.children)
        if s.merge in ("novel_only", "union"):
            offered = [(t, logp) for t, logp in look.ranking if t not in known]
        offered = offered[: s.refined_offer_width or self.config.offer_width]
        opinion = dict(look.ranking if s.merge in ("rescore_all", "union") else offered)
        siblings = {c.token: c for c in parent.children}
        won = [c for c in siblings.values() if self.settle(c, opinion.get(c.token, np.float32(-math.inf)))]
        for child in won:
            child.level = 1
            if child.look is UNSEEN:
                child.fed = feature
        novel = [
            self.create(parent, t, logp, 1, feature)
            for t, logp in offered
            if logp > -math.inf and (t not in siblings or s.merge == "append")
        ]
        return [c for c in won if c.look is UNSEEN] + novel

    def settle(self, child: Node, second: np.float32) -> bool:
        """Give the edge the log-prob that it has after the second look, and say whether level 1 wins it."""
        first, merge = child.logp, self.switches.merge
        if second == -math.inf or merge in ("drop", "novel_only", "append"):
            return False
        if merge in ("max", "union"):
            self.rescore(child, max(first, second))
        elif merge == "logmean":
            self.rescore(child, np.float32((first + second) / np.float32(2)))
        else:
            self.rescore(child, second)
            return True
        return bool(second > first)

    def rescore(self, child: Node, logp: np.float32) -> None:
        if logp != child.logp:
            child.logp = logp
            if not self.switches.propagate:
                assert child.parent
                child.pinned = np.float32(self.scores[child.parent] + logp)

    def create(self, parent: Node, token: int, logp: np.float32, level: int, fed: int) -> Node:
        pinned = None if self.switches.propagate else np.float32(self.scores[parent] + logp)
        child = Node(token, parent, len(self.nodes), logp, level, fed, pinned=pinned)
        parent.children.append(child)
        self.nodes.append(child)
        return child

    def cut(self) -> list[Node]:
        tree = [self.root]
        for _ in range(self.config.max_budget):
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
    kept = [0, *sorted(sorted(range(1, len(tokens)), key=order)[: config.max_budget])]
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
