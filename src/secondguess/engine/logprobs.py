"""Log-probabilities of emitted tokens: the target's own, whatever the request made of them when it sampled.

E emitted tokens of a request, T tokens of its prompt but the first, V vocabulary, H hidden size, K best tokens.
"""

from __future__ import annotations

from torch import Tensor

from secondguess.target.base import Target
from secondguess.types import TokenLogprobs

CHUNK = 128  # rows at once, so that the logits of a long prompt stay small


def score(logits_EV: Tensor, tokens_E: Tensor, num_best: int) -> list[TokenLogprobs]:
    """``logits_EV``: the target's, of the nodes that the tokens (int64 [E]) come after. In float32 at least."""
    logps_EV = logits_EV.float() if logits_EV.itemsize < 4 else logits_EV
    logps_EV = logps_EV.log_softmax(-1)
    own_E = logps_EV.gather(1, tokens_E[:, None])[:, 0].tolist()
    best_EK, ids_EK = logps_EV.topk(min(num_best, logps_EV.shape[1]))
    best = (zip(ids, logps, strict=True) for ids, logps in zip(ids_EK.tolist(), best_EK.tolist(), strict=True))
    return [TokenLogprobs(*row) for row in zip(tokens_E.tolist(), own_E, map(tuple, best), strict=True)]


def score_prompt(target: Target, hidden_TH: Tensor, tokens_T: Tensor, num_best: int) -> list[TokenLogprobs]:
    """``hidden_TH``: the target's states before each token."""
    parts = zip(hidden_TH.split(CHUNK), tokens_T.split(CHUNK), strict=True)
    return [row for states, tokens in parts for row in score(target.logits(states), tokens, num_best)]
