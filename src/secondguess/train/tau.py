"""Held-out acceptance length: the drafter as it is now, replayed over held-out responses (see ``bench.replay``).

Accuracy on single tokens misleads where trees and second looks are concerned; this is what serving would accept. The
target does not run: tokens and states of the responses are known. The last cycle of a response ends with it, which
makes tau a little smaller than ``secondguess eval`` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain

import torch

from secondguess.bench.acceptance import Tally, acceptance_length, count
from secondguess.bench.replay import Text, replay
from secondguess.config import Reconsider, TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.train.feed import Feed
from secondguess.train.parallel import Processes


def held_out_tau(
    drafter: Drafter, feed: Feed, indices: Sequence[int], budget: int, processes: Processes
) -> dict[str, float | None]:
    """Tau over these responses; of a drafter with second looks also without them (``_m0``). Nothing without responses.

    Each process replays its share.
    """
    if not indices:
        return {}
    default = TreeConfig()
    width = min(default.offer_width, drafter.config.draft_vocab_size)
    plain = replace(default, budget=budget, offer_width=width, num_reconsider=0)
    trees = {"held_out_tau": plain}
    if drafter.config.second_look:
        learnt = Reconsider(**asdict(drafter.config.second_look))
        second_looks = replace(plain, num_reconsider=default.num_reconsider, reconsider=learnt)
        trees = {"held_out_tau": second_looks, "held_out_tau_m0": plain}
    texts = read_texts(feed, processes.share(indices))
    return {name: tau(drafter, texts, tree, processes) for name, tree in trees.items()}


def tau(drafter: Drafter, texts: Sequence[Text], tree: TreeConfig, processes: Processes) -> float | None:
    tallies = [Tally(looping=False) for _ in texts]
    if texts:
        speculator = EagleSpeculator(drafter, tree, len(texts), max(t.num_written for t in texts))
        with torch.no_grad():
            replay(speculator, texts, partial(count, tallies))
    found = acceptance_length(list(chain.from_iterable(processes.gather(tallies))))
    return None if found is None else round(found, 4)


def read_texts(feed: Feed, indices: Sequence[int]) -> list[Text]:
    states, device = feed.source.read(indices), feed.head_VH.device
    return [
        Text(list(r.input_ids), s.taps_TLH.to(device).float(), r.prompt_len, len(r.input_ids))
        for r, s in zip((feed.responses[i] for i in indices), states, strict=True)
    ]
