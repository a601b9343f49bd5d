"""Coupled drafting: the drafter guesses with the very noise that the target will draw with.

A token of a sampled text is argmax(log p / T + G), where the noise G is a function of seed, position and token id
(engine.noise), so it is known before the target runs. Where q is close to p, argmax(log q / T + G) is likely that
token, while the most probable token under q alone is only as likely as p makes it. What is offered cannot change the
text: a token depends on its prefix and its noise alone, whatever the tree (ours; not in arXiv 2611.05724).

R requests, D depths, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secondguess.engine.noise import gumbel
from secondguess.engine.speculate import Draw


def coming_noise(draws: Sequence[Draw], lengths: Sequence[int], num_depths: int, target_ids: Tensor) -> Tensor | None:
    """T times the noise of the tokens at depths 1 to ``num_depths``: float32 [R, D, V], 0 in greedy requests.

    ``lengths``: tokens so far, those of the roots included. ``target_ids`` (int64 [V]): the tokens that can be drafted.
    None if every request is greedy.
    """
    sampled = [(r, draw) for r, draw in enumerate(draws) if not draw.greedy]
    if not sampled:
        return None
    device = target_ids.device
    noise_RDV = torch.zeros(len(draws), num_depths, len(target_ids), device=device)
    for r, draw in sampled:
        positions_D = torch.arange(lengths[r], lengths[r] + num_depths, device=device)
        seeds_D, choices_D = torch.full_like(positions_D, draw.seed), torch.full_like(positions_D, draw.choice)
        noise_RDV[r] = draw.temperature * gumbel(seeds_D, choices_D, positions_D, target_ids)
    return noise_RDV
