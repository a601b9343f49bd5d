"""Acceptance without verification: a drafter runs over texts whose tokens and target states are known.

Speculation cannot change a text, so each cycle's tree meets the tokens that verification would have chosen. One prefill
of the whole text gives the target's states. On the CPU this takes a small part of the time of decoding.

R requests, D path length, T tokens of a text, L tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.bench.transcript import Transcript
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.speculate import GREEDY, Accepted, Draw, Roots, Speculator
from secondguess.target.base import Target, causal_rows
from secondguess.tree.walk import walk
from secondguess.types import DraftTree, TargetOut

# Hears of every cycle: which texts took part, in the order of the trace's rows, and what happened.
Listener = Callable[[Sequence[int], CycleTrace], None]


@dataclass(frozen=True, slots=True)
class Text:
    """A transcript, ready for replay."""

    ids: list[int]  # prompt, answer, and what would have come next
    taps_TLH: Tensor  # the target's states at prompt and answer
    num_prompt: int
    num_written: int  # prompt and answer
    draw: Draw = GREEDY


def read(target: Target, transcript: Transcript, draw: Draw = GREEDY) -> Text:
    """Run the target over a transcript, once for all drafters. ``draw``: how its tokens were drawn."""
    return text_of(transcript, draw, prefill(target, transcript, last_only=True))


@torch.no_grad()
def prefill(target: Target, transcript: Transcript, last_only: bool) -> TargetOut:
    """The target over prompt and answer, a request of its own. ``last_only``: see ``Target.forward``."""
    written = transcript.prompt_ids + transcript.answer_ids
    cache = target.new_cache(1, len(written))
    zero_1 = torch.zeros(1, dtype=torch.int64, device=target.spec.device)
    ids_1T = torch.tensor([written], device=target.spec.device)
    return target.forward(causal_rows(zero_1, ids_1T), cache, last_only)


def text_of(transcript: Transcript, draw: Draw, out: TargetOut) -> Text:
    num_prompt, ids = len(transcript.prompt_ids), transcript.prompt_ids + transcript.answer_ids
    return Text([*ids, *transcript.beyond_ids], out.taps_RNLH[0], num_prompt, len(ids), draw)


def replay(speculator: Speculator, texts: Sequence[Text], listen: Listener) -> None:
    """Draft and walk, cycle after cycle, until every text is through. Text i has slot i of ``speculator``."""
    newest = [t.num_prompt for t in texts]  # of each text, the index of the newest emitted token: prefill emits one
    speculator.accept([emitted(i, t, 0, t.num_prompt) for i, t in enumerate(texts)])
    while running := [i for i, t in enumerate(texts) if newest[i] + 1 < t.num_written]:
        tree = speculator.draft(roots_of([texts[i] for i in running], running, [newest[i] for i in running]))
        verdict = walk(tree, known_tokens(tree, [texts[i].ids[newest[i] + 1 :] for i in running]))
        listen(running, CycleTrace(tree, verdict))
        spans = [(i, newest[i], n) for i, n in zip(running, verdict.num_emitted_R.tolist(), strict=True)]
        for i, _, n in spans:
            newest[i] += n
        speculator.accept([emitted(i, texts[i], start, n) for i, start, n in spans if newest[i] < texts[i].num_written])
    for i in range(len(texts)):
        speculator.release(i)


def roots_of(texts: Sequence[Text], slots: Sequence[int], newest: Sequence[int]) -> Roots:
    """Where texts stand whose newest emitted token has index ``newest``."""
    return Roots(
        slots=tuple(slots),
        tokens=tuple(t.ids[n] for t, n in zip(texts, newest, strict=True)),
        histories=tuple(t.ids[: n + 1] for t, n in zip(texts, newest, strict=True)),
        draws=tuple(t.draw for t in texts),
        device=texts[0].taps_TLH.device,
    )


def emitted(slot: int, text: Text, start: int, count: int) -> Accepted:
    """``count`` tokens after index ``start``, with the states before them."""
    tokens = torch.tensor(text.ids[start + 1 : start + 1 + count], device=text.taps_TLH.device)
    return Accepted(slot, tokens, text.taps_TLH[start : start + count])


def known_tokens(tree: DraftTree, coming: Sequence[list[int]]) -> Callable[[Tensor, Tensor], Tensor]:
    """What ``walk`` asks: the token after each node. ``coming[r]`` are the tokens after the root of request r."""
    depth = int(tree.depths_RN.max()) + 1
    coming_RD = torch.tensor([(ids + [-1] * depth)[:depth] for ids in coming], device=tree.tokens_RN.device)
    return lambda node_R, _: coming_RD.gather(1, tree.depths_RN.gather(1, node_R[:, None]))[:, 0]
