"""A draft tree on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from rich.text import Text
from rich.tree import Tree

from secondguess.commands.show_text import STYLES
from secondguess.engine.cycle import CycleTrace

KEY = "the drafter's probability after the parent, 0 for level 0, R for refined"


def draw_tree(trace: CycleTrace, decode: Callable[[int], str]) -> Tree:
    """What a batch of one drafted last, likelier siblings first, its accepted path marked and the bonus token added.

    ``decode`` gives the text of a token id.
    """
    tree, verdict = trace.tree, trace.verdict
    tokens, parents, depths = (x_RN[0].tolist() for x_RN in (tree.tokens_RN, tree.parents_RN, tree.depths_RN))
    scores, levels = tree.scores_RN[0].tolist(), tree.levels_RN[0].tolist()
    num_emitted = int(verdict.num_emitted_R[0])
    path = verdict.path_RD[0, :num_emitted].tolist()
    root = Tree(Text.assemble((repr(decode(tokens[0])), "bold"), " newest token"))
    drawn = {0: root}
    for node in sorted(range(1, int(tree.valid_RN[0].sum())), key=lambda n: (depths[n], -scores[n])):
        parent = parents[node]
        probability = exp(scores[node] - scores[parent])
        drawn[node] = drawn[parent].add(_label(decode(tokens[node]), probability, levels[node], node in path))
    bonus = decode(int(verdict.tokens_RD[0, num_emitted - 1]))
    drawn[path[-1]].add(Text.assemble((repr(bonus), "bold"), " bonus"))
    return root


def _label(token: str, probability: float, level: int, accepted: bool) -> Text:
    style = STYLES["refined" if level else "level0"]
    return Text.assemble(
        (repr(token), f"{style} reverse" if accepted else style),
        f" {probability:.0%} ",
        ("R" if level else "0", style),
        (" accepted" if accepted else "", "bold"),
    )
