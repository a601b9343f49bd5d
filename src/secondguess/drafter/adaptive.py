"""Drafting as a policy says: fewer nodes, steps or second looks where more would not pay, or nothing at all."""

from __future__ import annotations

from statistics import fmean

import torch

from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Plain, Policy, Roots
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import DraftTree, Verdict


class AdaptiveSpeculator(EagleSpeculator):
    """``config``: the most that a draft takes. ``policy`` is asked before every draft."""

    def __init__(self, drafter: Drafter, config: TreeConfig, num_slots: int, num_columns: int, policy: Policy) -> None:
        super().__init__(drafter, config, num_slots, num_columns)
        self.policy = policy

    @torch.inference_mode()
    def draft(self, roots: Roots) -> DraftTree:
        context = fmean(map(len, roots.histories))
        plan, self.num_steps = self.policy.plan(roots.draws, context), 0
        if plan is None:
            return Plain().draft(roots)
        root, round_ = self.begin(roots)
        self.num_steps = 1

        def forward(rows: DraftRows) -> Offers:
            self.num_steps += 1
            return round_.forward(rows)

        return self.grow_tree(plan.config, root, forward, plan.guide)

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        self.policy.learn(tree, verdict, seconds)
