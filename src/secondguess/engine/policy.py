"""``budget="auto"``: each cycle's nodes, steps and second looks by what they cost and promise, down to plain decoding.

Costs are measured at start-up. What drafts promise is learnt while decoding, by one engine for itself, and its state is
what the attributes here hold. Nothing of this can change a text.

R requests, N nodes of a tree, D path length.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from secondguess.config import Reconsider, TreeConfig
from secondguess.engine.calibration import Calibration
from secondguess.engine.costs import CostModel
from secondguess.engine.regime import Regime, regime_key, warmth
from secondguess.engine.speculate import Draw
from secondguess.engine.worth import Prices, Worth, host
from secondguess.tree.guide import Plan
from secondguess.types import DraftTree, Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cycle:
    """The cycle under way. ``worth``: None where it does not draft."""

    regime: Regime
    prices: Prices
    warmths: list[int]
    worth: Worth | None = None
    looking: bool = False


class Auto:
    """The policy of one engine."""

    cycle: Cycle

    def __init__(self, config: TreeConfig, costs: CostModel) -> None:
        """``config``: the most that a draft may take. ``costs``: of this machine, target and drafter."""
        self.config, self.costs = config, costs
        self.without_looks = replace(config, num_reconsider=0, reconsider=Reconsider())
        self.calibrations: dict[int, Calibration] = {}  # by warmth
        self.regimes: dict[tuple[int, int], Regime] = {}
        self.prices: dict[int, Prices] = {}  # by requests

    def plan(self, draws: Sequence[Draw], context: float) -> Plan | None:
        warmths, prices = [warmth(draw) for draw in draws], self._prices(len(draws)).after(context)
        regime = self.regimes.setdefault(regime_key(warmths), Regime.new(self.config.offer_width))
        self.cycle = Cycle(regime, prices, warmths)
        if not regime.switch.drafts():
            return None
        looking = self.config.num_reconsider > 0 and regime.looks((prices.step_looking - prices.step) / prices.plain)
        calibrations = {w: self.calibrations.setdefault(w, Calibration.blank()) for w in warmths}
        worth = Worth(
            after_N=prices.after_N,
            step=prices.step_looking if looking else prices.step,
            pace=regime.best_pace * len(draws) / prices.plain,
            offsets=[(np.equal(warmths, w), calibration.offsets()) for w, calibration in calibrations.items()],
            child_probs_K=regime.child_probs_K,
            grow_width=self.config.grow_width,
        )
        self.cycle = replace(self.cycle, worth=worth, looking=looking)
        return Plan(self.config if looking else self.without_looks, worth)

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        regime, prices, worth = self.cycle.regime, self.cycle.prices, self.cycle.worth
        requests = len(tree.tokens_RN)
        tokens = float(verdict.num_emitted_R.sum()) / requests
        if regime.switch.learn(worth is not None, tokens, seconds / prices.plain, requests):
            log.info("drafting is slower than plain decoding in batches of %d: it pauses there", requests)
        if worth is None:
            return
        predicted = prices.start + worth.num_steps * worth.step + float(prices.after_N[worth.num_nodes])
        regime.pace.add(tokens, predicted / prices.plain)
        regime.steps.add(worth.num_steps, 1.0)
        if worth.root_probs_K is not None:
            regime.offered(worth.root_probs_K)
        if self.cycle.looking:
            refined = int(tree.levels_RN.gather(1, verdict.path_RD.clamp(min=0)).sum())  # the root's level is 0
            regime.refined.add(refined / requests, 1.0)
        self._calibrate(tree, verdict)

    def _calibrate(self, tree: DraftTree, verdict: Verdict) -> None:
        scores_RN, drafted_RN = host(tree.scores_RN), host(tree.valid_RN & (tree.depths_RN > 0))
        accepted_RN = np.zeros_like(drafted_RN)
        np.put_along_axis(accepted_RN, host(verdict.path_RD.clamp(min=0)), True, axis=1)
        warmth_R = np.array(self.cycle.warmths)
        for w in set(self.cycle.warmths):
            of_RN = drafted_RN & (warmth_R == w)[:, None]
            self.calibrations[w] = self.calibrations[w].seen(scores_RN[of_RN], accepted_RN[of_RN])

    def _prices(self, requests: int) -> Prices:
        if requests not in self.prices:
            c, rows = self.config, requests * (self.config.grow_width + self.config.extra_advance)
            verified_N = requests * np.arange(1, c.max_budget + 2)
            self.prices[requests] = Prices(
                after_N=self.costs.verify(verified_N, requests),
                start=self.costs.draft_start(requests),
                step=self.costs.draft_step(rows),
                step_looking=self.costs.draft_step(rows + requests * c.num_reconsider),
                context=self.costs.context,
                further_N=self.costs.verify_further(verified_N, requests),
            )
        return self.prices[requests]
