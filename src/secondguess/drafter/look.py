"""What a look at a feature asks and what it yields: the query of level 1, the offers of both levels.

R requests, M rows of level 1, X rows of a forward (those of level 1 last), K offers, V draft vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess.config import SecondLook, TreeConfig
from secondguess.drafter.model import Drafter, full_precision
from secondguess.tree.rows import Offers


def query(drafter: Drafter, look: SecondLook, e: Tensor, f: Tensor) -> Tensor:
    """What stands where level 0 has the token's embedding ``e``; ``f`` is its level-0 feature. [..., H] each."""
    if look.query_slot == "self_query":
        return drafter.self_query.expand_as(e)
    if look.query_slot == "soft_pred":
        probs = full_precision(drafter.logits(f)).softmax(dim=-1).to(e.dtype)
        return probs @ drafter.embed(drafter.target_ids)
    return e


def ask(drafter: Drafter, look: SecondLook, e: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """What M reads at a second look of feature ``f`` in place of embedding and feature. [..., H] each."""
    asked = query(drafter, look, e, f)
    if not drafter.config.lens:
        return asked, f
    to_e, to_f = drafter.lens(f).chunk(2, dim=-1)
    return asked + to_e, f + to_f


def offer(
    drafter: Drafter,
    config: TreeConfig,
    f_RXH: Tensor,
    known_RMK: Tensor | None = None,
    noise_RXV: Tensor | None = None,
) -> Offers:
    """The ``offer_width`` most probable children of each feature, at temperature 1.

    ``noise_RXV``: the children's, of coupled drafting. The softmax of log q + T G then stands in for q: how probable a
    token is to be drawn, for one who knows the noise and takes log q for log p up to an error.
    ``known_RMK``: target ids that level 0 offered at the nodes of the last M rows. Where merging asks, these rows'
    log-probs of them are given too, or these rows offer others.
    """
    reconsider, num_rows = config.reconsider, f_RXH.shape[1]
    scores_RXV = drafter.logits(f_RXH).float()
    if noise_RXV is not None:
        scores_RXV = scores_RXV + noise_RXV
    logps_RXV = scores_RXV.log_softmax(dim=-1)
    doubt_RX, known_logps_RMK = doubt(logps_RXV, reconsider.select), None
    if known_RMK is not None:
        level1_RMV = logps_RXV[:, num_rows - known_RMK.shape[1] :]
        known_ids_RMK = torch.searchsorted(drafter.target_ids, known_RMK)  # exact: only draft tokens are offered
        if reconsider.rates_known:
            known_logps_RMK = level1_RMV.gather(2, known_ids_RMK)
        if reconsider.offers_novel:
            level1_RMV.scatter_(2, known_ids_RMK, -torch.inf)
    logps_RXK, ids_RXK = logps_RXV.topk(config.offer_width, dim=-1)
    return Offers(drafter.target_ids[ids_RXK], logps_RXK, logps_RXK[..., 0].exp(), doubt_RX, known_logps_RMK)


def doubt(logps_RXV: Tensor, select: str) -> Tensor | None:
    """[R, X]: what entropy and margin rank nodes by, the most doubtful highest; None if nobody asks."""
    if select == "entropy":
        return -(logps_RXV.exp() * logps_RXV).sum(-1)
    if select == "margin":
        first_RX, second_RX = logps_RXV.topk(2, dim=-1).values.exp().unbind(-1)
        return second_RX - first_RX
    return None
