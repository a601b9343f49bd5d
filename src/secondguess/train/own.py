"""Did the target write the answers itself? A drafter that learnt from others' texts guesses what is never written.

A token drawn from p surprises p by -log p(token), on average by p's entropy; a greedy one by the least that can be.
So the mean of what exceeds this is 0 for the target's own answers, whatever it is sure of, and above 0 for texts of
other models or people, or of another prompt than the one recorded. (SmolLM2-135M-Instruct, 20 prompts, 40 tokens each,
nats a token: its own answers 0.00 greedily and 0.02 at temperature 1, those to the prompt before 0.93 and 0.55, a page
that people wrote 1.05.)

X tokens of an answer that the drafter can offer, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.drafter.checks import FOREIGN
from secondguess.drafter.model import full_precision
from secondguess.train.feed import Feed

MOST_ANSWERS, MOST_TOKENS = 32, 512  # of each answer: enough to be sure
ERRORS = 3  # standard errors of a mean that are left to chance


def check_answers(feed: Feed, indices: Sequence[int]) -> float | None:
    """See ``surprise``; the log is warned if it is too high."""
    found = surprise(feed, indices)
    if found is not None and found > FOREIGN:
        logging.getLogger(__name__).warning(
            "the responses surprise the target by %.2f nats a token more than its own texts would: they are of another "
            "model, another prompt or another chat template; 'secondguess prepare' has the target answer",
            found,
        )
    return found


def surprise(feed: Feed, indices: Sequence[int]) -> float | None:
    """Nats a token by which some of these answers, at the least, surprise the target more than its own texts would.

    None if there are not two tokens to tell it by.
    """
    excess_X = torch.cat([excess(feed, i) for i in indices[:MOST_ANSWERS]])
    if len(excess_X) < 2:
        return None
    error = excess_X.std().item() / len(excess_X) ** 0.5
    return round(excess_X.mean().item() - ERRORS * error, 4)


@torch.no_grad()
def excess(feed: Feed, i: int) -> Tensor:
    """[X]: by how much each token of an answer surprises the target, less what it would expect.

    Of the distribution over the draft vocabulary, at the temperature that the answer was written at, if that is known.
    """
    response, batch = feed.responses[i], feed.batch([i])
    tokens_T = batch.tokens_T[response.prompt_len :][:MOST_TOKENS]
    before_TH = batch.hidden_TH[response.prompt_len - 1 :][: len(tokens_T)]
    ids_T = feed.draft_of[tokens_T]
    scores_XV = full_precision(before_TH[ids_T >= 0] @ feed.head_VH.T)
    logp_XV = (scores_XV / (response.temperature or 1.0)).log_softmax(-1)
    expected_X = -logp_XV.amax(-1) if response.temperature == 0 else -(logp_XV.exp() * logp_XV).sum(-1)
    return -logp_XV.gather(1, ids_T[ids_T >= 0][:, None]).squeeze(1) - expected_X
