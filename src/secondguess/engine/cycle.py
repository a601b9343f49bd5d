"""One cycle of speculative decoding: draft, verify, walk, commit. Plain decoding is the same cycle with lone roots.

R requests, N tree nodes (0 is the root), W cache columns, D path length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from time import perf_counter

import torch
from torch import Tensor

from secondguess.engine.logprobs import score
from secondguess.engine.sampler_state import SamplerState, record
from secondguess.engine.sampling import choose
from secondguess.engine.sequence import Sequence
from secondguess.engine.slots import SlotCache
from secondguess.engine.speculate import Accepted, Draw, Roots, Speculator
from secondguess.target.base import Target
from secondguess.tree.layout import ancestors_or_self
from secondguess.tree.trim import no_deeper
from secondguess.tree.walk import walk
from secondguess.types import DraftTree, Origin, Rows, Totals, Verdict

# Hears of every token as it is chosen: logits [R, V], sampler, positions [R], active [R].
Watcher = Callable[[Tensor, SamplerState, Tensor, Tensor], None]


@dataclass(slots=True)
class Batch:
    """The requests of a cycle, in the order of their rows."""

    sequences: list[Sequence]
    sampler: SamplerState


@dataclass(frozen=True, slots=True)
class CycleTrace:
    """What a cycle drafted and accepted."""

    tree: DraftTree
    verdict: Verdict


@dataclass(slots=True)
class Engine:
    """What a cycle needs and keeps. ``last`` is the newest cycle's trace, None if a prefill came after it."""

    target: Target
    speculator: Speculator
    cache: SlotCache
    watch: Watcher | None = None
    last: CycleTrace | None = field(default=None, repr=False)
    totals: Totals = field(default_factory=Totals)


def run_cycle(engine: Engine, batch: Batch) -> None:
    """Draft a tree per request, verify all trees in one forward pass, emit what the target agrees with."""
    started = perf_counter()
    tree = engine.speculator.draft(roots_of(batch.sequences, engine.target.spec.device))
    tree = no_deeper(tree, rooms(batch.sequences, engine.target.spec.context_len))
    drafted = perf_counter()
    rows = verify_rows(tree, batch.sequences)
    out = engine.target.forward(rows, engine.cache)
    verified = perf_counter()
    verdict = walk(tree, chooser(out.logits_RNV, rows.positions_RN, batch.sampler, engine.watch))
    walked = perf_counter()
    engine.cache.compact(
        rows.slots_R,
        rows.columns_RN.gather(1, verdict.path_RD.clamp(min=0)),
        rows.columns_RN[:, 0],
        verdict.num_emitted_R,
    )
    engine.speculator.accept(accepted_of(verdict, batch.sequences, out.taps_RNLH))
    steps = [engine.speculator.steps_for(s.slot) for s in batch.sequences]
    count(tree, verdict, steps, batch.sequences, engine.totals)
    engine.totals.num_tokens += emit(tree, verdict, batch.sequences, out.logits_RNV)
    engine.last = CycleTrace(tree, verdict)
    engine.speculator.learn(tree, verdict, perf_counter() - started)
    charge(batch.sequences, (started, drafted, verified, walked, perf_counter()))


def roots_of(sequences: list[Sequence], device: torch.device) -> Roots:
    """Where each request stands, in the order of the batch's rows."""
    return Roots(
        slots=tuple(s.slot for s in sequences),
        tokens=tuple(s.token_ids[-1] for s in sequences),
        histories=tuple(s.token_ids for s in sequences),
        draws=tuple(Draw(s.request.params.temperature, s.seed, s.request.choice) for s in sequences),
        device=device,
    )


def rooms(sequences: list[Sequence], context_len: int) -> list[int]:
    """How deep the tree of each request may go: the bonus token is the last that the target's context holds."""
    return [context_len - len(s.token_ids) - 1 for s in sequences]


def verify_rows(tree: DraftTree, sequences: list[Sequence]) -> Rows:
    """Node n of a request lies ``n`` columns after its cached tokens, at the position of its depth."""
    device = tree.tokens_RN.device
    cached_R1 = torch.tensor([[s.num_cached] for s in sequences], device=device)
    num_nodes = tree.tokens_RN.shape[1]
    positions_RN = cached_R1 + tree.depths_RN
    columns_W = torch.arange(max(s.num_cached for s in sequences) + num_nodes, device=device)
    node_RW = (columns_W - cached_R1).clamp(0, num_nodes - 1)
    in_prefix_RW, in_tree_RW = columns_W < cached_R1, columns_W < cached_R1 + num_nodes
    above_RNW = ancestors_or_self(tree.parents_RN).gather(2, node_RW[:, None].expand(-1, num_nodes, -1))
    return Rows(
        slots_R=torch.tensor([s.slot for s in sequences], device=device),
        tokens_RN=tree.tokens_RN,
        positions_RN=positions_RN,
        columns_RN=cached_R1 + torch.arange(num_nodes, device=device),
        visible_RNW=in_prefix_RW[:, None] | (in_tree_RW[:, None] & above_RNW),
        column_positions_RW=torch.where(in_prefix_RW, columns_W, positions_RN.gather(1, node_RW)),
    )


def chooser(
    logits_RNV: Tensor, positions_RN: Tensor, sampler: SamplerState, watch: Watcher | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The target's token after each node that is walked, chosen exactly as in plain decoding, and recorded."""
    each_R = torch.arange(len(logits_RNV), device=logits_RNV.device)

    def choose_at(node_R: Tensor, active_R: Tensor) -> Tensor:
        logits_RV, position_R = logits_RNV[each_R, node_R], positions_RN[each_R, node_R] + 1
        token_R = choose(logits_RV, sampler, position_R)
        if watch:
            watch(logits_RV, sampler, position_R, active_R)
        record(sampler, token_R, active_R)
        return token_R

    return choose_at


def accepted_of(verdict: Verdict, sequences: list[Sequence], taps_RNLH: Tensor) -> list[Accepted]:
    """What the speculator hears: each request's new tokens, with the taps of the nodes that they come after."""
    counts = verdict.num_emitted_R.tolist()
    return [
        Accepted(s.slot, verdict.tokens_RD[r, :n], taps_RNLH[r, verdict.path_RD[r, :n]])
        for r, (s, n) in enumerate(zip(sequences, counts, strict=True))
    ]


def count(tree: DraftTree, verdict: Verdict, steps: list[int], sequences: list[Sequence], totals: Totals) -> None:
    """What was drafted for each request, and what it accepted. A tree's root is valid, at level 0, and no draft.

    ``steps``: forwards of the drafter, of each request's draft.
    """
    drafted_R = tree.valid_RN.sum(1) - 1
    refined_R = (tree.levels_RN * tree.valid_RN).sum(1)
    on_path_RD = torch.arange(verdict.path_RD.shape[1], device=drafted_R.device) < verdict.num_emitted_R[:, None]
    accepted_refined_R = (tree.levels_RN.gather(1, verdict.path_RD.clamp(min=0)) * on_path_RD).sum(1)
    table = torch.stack([drafted_R, verdict.num_emitted_R - 1, refined_R, accepted_refined_R], 1).tolist()
    for s, row, num_steps in zip(sequences, table, steps, strict=True):
        s.drafting.count(*row, num_steps=num_steps)
        totals.drafting.count(*row, num_steps=num_steps)


def emit(tree: DraftTree, verdict: Verdict, sequences: list[Sequence], logits_RNV: Tensor) -> int:
    """Hand every request its tokens. A draft token's origin is the level of its node; the last one is the bonus.

    Returns how many were taken: those after a request's end are not.
    """
    before = sum(len(s.origins) for s in sequences)
    levels_RD = tree.levels_RN.gather(1, verdict.path_RD.clamp(min=0))
    rows = zip(verdict.tokens_RD.tolist(), verdict.num_emitted_R.tolist(), levels_RD.tolist(), strict=True)
    for r, (s, (tokens, n, levels)) in enumerate(zip(sequences, rows, strict=True)):
        origins: list[Origin] = ["refined" if level else "level0" for level in levels[1:n]]
        origins.append("bonus")
        num_best, scored = s.request.params.logprobs, repeat(None)
        if num_best is not None:
            scored = score(logits_RNV[r, verdict.path_RD[r, :n]], verdict.tokens_RD[r, :n], num_best)
        for token, origin, logprobs in zip(tokens[:n], origins, scored, strict=False):
            s.emit(token, origin, logprobs)
    return sum(len(s.origins) for s in sequences) - before


def charge(sequences: list[Sequence], times: tuple[float, ...]) -> None:
    """Add a cycle's parts to every request that took part. ``times`` are the borders between the parts."""
    draft, verify, walked, rest = (b - a for a, b in pairwise(times))
    for s in sequences:
        s.timing.draft += draft
        s.timing.verify += verify
        s.timing.walk += walked
        s.timing.rest += rest
