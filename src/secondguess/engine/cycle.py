"""One cycle of speculative decoding: draft, verify, walk, commit. Plain decoding is the same cycle with lone roots.

R requests, N tree nodes (0 is the root), W cache columns, D path length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from time import perf_counter

import torch
from torch import Tensor

from secondguess import device
from secondguess.device import upload
from secondguess.engine.clock import Clock
from secondguess.engine.logprobs import score
from secondguess.engine.sampler_state import SamplerState, keep, record
from secondguess.engine.sampling import choose
from secondguess.engine.sequence import Sequence
from secondguess.engine.slots import SlotCache
from secondguess.engine.speculate import Accepted, Draw, Roots, Speculator
from secondguess.target.base import Target
from secondguess.tree.layout import ancestors_or_self
from secondguess.tree.trim import no_deeper, row_of
from secondguess.tree.walk import walk
from secondguess.types import DraftTree, Origin, Rows, Totals, Verdict

# Hears of every token as it is chosen: logits [R, V], sampler, positions [R], active [R].
Watcher = Callable[[Tensor, SamplerState, Tensor, Tensor], None]
ChooseAt = Callable[[Tensor, Tensor], Tensor]  # see ``walk``


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

    def of(self, r: int) -> CycleTrace:
        """What it did for request ``r`` alone."""
        one, verdict = slice(r, r + 1), self.verdict
        row = Verdict(verdict.path_RD[one], verdict.tokens_RD[one], verdict.num_emitted_R[one])
        return CycleTrace(row_of(self.tree, r), row)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cycle came to for one request, on the host."""

    tokens: list[int]  # emitted: accepted draft tokens, then the bonus token
    levels: list[int]  # of the nodes that they come after, the root first
    num_drafted: int
    num_refined: int  # of the drafted tokens, those of level 1


def as_chosen(tree: DraftTree, choose_at: ChooseAt) -> ChooseAt:
    """The target's own choices; a measurement may put others in their place."""
    return choose_at


@dataclass(slots=True)
class Engine:
    """What a cycle needs and keeps. ``last`` is the newest cycle's trace, None if a prefill came after it."""

    target: Target
    speculator: Speculator
    cache: SlotCache
    watch: Watcher | None = None
    script: Callable[[DraftTree, ChooseAt], ChooseAt] = as_chosen
    last: CycleTrace | None = field(default=None, repr=False)
    totals: Totals = field(default_factory=Totals)


def run_cycle(engine: Engine, batch: Batch) -> None:
    """Draft a tree per request, verify all trees in one forward pass, emit what the target agrees with."""
    clock = Clock(engine.target.spec.device)
    clock.mark()
    tree = engine.speculator.draft(roots_of(batch.sequences, engine.target.spec.device))
    tree = no_deeper(tree, rooms(batch.sequences, engine.target.spec.context_len))
    clock.mark()
    rows = verify_rows(tree, batch.sequences)
    out = engine.target.forward(rows, engine.cache)
    clock.mark()
    choose_at = chooser(out.logits_RNV, rows.positions_RN, batch.sampler, engine.watch)
    verdict = walk(tree, engine.script(tree, choose_at))
    clock.mark()
    engine.cache.compact(  # a root is where it should be
        rows.slots_R,
        rows.columns_RN.gather(1, verdict.path_RD[:, 1:].clamp(min=0)),
        rows.columns_RN[:, 0] + 1,
        verdict.num_emitted_R - 1,
    )
    outcomes = outcomes_of(tree, verdict)
    engine.speculator.accept(accepted_of(outcomes, verdict, batch.sequences, out.taps_RNLH))
    count(outcomes, engine.speculator, batch.sequences, engine.totals)
    engine.totals.num_tokens += emit(outcomes, verdict, batch.sequences, out.logits_RNV)
    engine.last = CycleTrace(tree, verdict)
    show(engine.last, batch.sequences)
    engine.speculator.learn(tree, verdict, perf_counter() - clock.started)
    charge(batch.sequences, clock.parts())


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
    device, num_nodes = tree.tokens_RN.device, tree.tokens_RN.shape[1]
    slots_R1, cached_R1 = upload([(s.slot, s.num_cached) for s in sequences], device).split(1, 1)
    positions_RN = cached_R1 + tree.depths_RN
    columns_W = torch.arange(max(s.num_cached for s in sequences) + num_nodes, device=device)
    node_RW = (columns_W - cached_R1).clamp(0, num_nodes - 1)
    in_prefix_RW, in_tree_RW = columns_W < cached_R1, columns_W < cached_R1 + num_nodes
    above_RNW = ancestors_or_self(tree.parents_RN).gather(2, node_RW[:, None].expand(-1, num_nodes, -1))
    return Rows(
        slots_R=slots_R1[:, 0],
        tokens_RN=tree.tokens_RN,
        positions_RN=positions_RN,
        columns_RN=cached_R1 + torch.arange(num_nodes, device=device),
        visible_RNW=in_prefix_RW[:, None] | (in_tree_RW[:, None] & above_RNW),
        column_positions_RW=torch.where(in_prefix_RW, columns_W, positions_RN.gather(1, node_RW)),
        slots=tuple(s.slot for s in sequences),
    )


def chooser(logits_RNV: Tensor, positions_RN: Tensor, sampler: SamplerState, watch: Watcher | None) -> ChooseAt:
    """The target's token after each node that is walked, chosen exactly as in plain decoding, and recorded."""
    each_R = torch.arange(len(logits_RNV), device=logits_RNV.device)
    choosy = not sampler.settings.plain and device.at_hand(logits_RNV)  # a GPU does all before it could say which

    def choose_at(node_R: Tensor, active_R: Tensor) -> Tensor:
        logits_RV, position_R = logits_RNV[each_R, node_R], positions_RN[each_R, node_R] + 1
        if choosy and not active_R.all():
            token_R = choose_some(logits_RV, sampler, position_R, active_R.nonzero()[:, 0])
        else:
            token_R = choose(logits_RV, sampler, position_R)
        if watch:
            watch(logits_RV, sampler, position_R, active_R)
        record(sampler, token_R, active_R)
        return token_R

    return choose_at


def choose_some(logits_RV: Tensor, sampler: SamplerState, positions_R: Tensor, rows_S: Tensor) -> Tensor:
    """``choose`` for the rows ``rows_S``, whose tokens do not depend on their batch-mates; 0 elsewhere."""
    token_S = choose(logits_RV[rows_S], keep(sampler, rows_S.tolist()), positions_R[rows_S])
    return torch.zeros_like(positions_R).index_copy(0, rows_S, token_S)


def outcomes_of(tree: DraftTree, verdict: Verdict) -> list[Outcome]:
    """Of each request. The only time in a cycle that the host waits for the device."""
    levels_RD = tree.levels_RN.gather(1, verdict.path_RD.clamp(min=0))
    # A tree's root is valid, at level 0, and no draft.
    drafted_R, refined_R = tree.valid_RN.sum(1) - 1, (tree.levels_RN * tree.valid_RN).sum(1)
    counts_R3, d = torch.stack([verdict.num_emitted_R, drafted_R, refined_R], 1), levels_RD.shape[1]
    table = torch.cat([counts_R3, verdict.tokens_RD, levels_RD], 1).tolist()
    return [Outcome(row[:n], row[d : d + n], drafted, refined) for n, drafted, refined, *row in table]


def accepted_of(
    outcomes: list[Outcome], verdict: Verdict, sequences: list[Sequence], taps_RNLH: Tensor
) -> list[Accepted]:
    """What the speculator hears: each request's new tokens, with the taps of the nodes that they come after."""
    each_R1 = torch.arange(len(sequences), device=taps_RNLH.device)[:, None]
    taps_RDLH = taps_RNLH[each_R1, verdict.path_RD.clamp(min=0)]
    lengths = [len(outcome.tokens) for outcome in outcomes]
    return [
        Accepted(s.slot, verdict.tokens_RD[r, :n], taps_RDLH[r, :n])
        for r, (s, n) in enumerate(zip(sequences, lengths, strict=True))
    ]


def count(outcomes: list[Outcome], speculator: Speculator, sequences: list[Sequence], totals: Totals) -> None:
    """What was drafted for each request, in how many forwards of the drafter, and what it accepted."""
    for s, o in zip(sequences, outcomes, strict=True):
        for drafting in (s.drafting, totals.drafting):
            drafting.count(
                o.num_drafted, len(o.tokens) - 1, o.num_refined, sum(o.levels), num_steps=speculator.steps_for(s.slot)
            )


def emit(outcomes: list[Outcome], verdict: Verdict, sequences: list[Sequence], logits_RNV: Tensor) -> int:
    """Hand every request its tokens. A draft token's origin is the level of its node; the last one is the bonus.

    Returns how many were taken: those after a request's end are not.
    """
    before = sum(len(s.origins) for s in sequences)
    for r, (s, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
        origins: list[Origin] = ["refined" if level else "level0" for level in outcome.levels[1:]]
        origins.append("bonus")
        num_best, scored, n = s.request.params.logprobs, repeat(None), len(outcome.tokens)
        if num_best is not None:
            scored = score(logits_RNV[r, verdict.path_RD[r, :n]], verdict.tokens_RD[r, :n], num_best)
        for token, origin, logprobs in zip(outcome.tokens, origins, scored, strict=False):
            s.emit(token, origin, logprobs)
    return sum(len(s.origins) for s in sequences) - before


def show(trace: CycleTrace, sequences: list[Sequence]) -> None:
    """Hand the requests that are traced what became of their trees."""
    for r, s in enumerate(sequences):
        if s.request.traced:
            s.traces.append(trace.of(r))


def charge(sequences: list[Sequence], parts: list[float]) -> None:
    """Add the seconds of a cycle's parts to every request that took part."""
    draft, verify, walked, rest = parts
    for s in sequences:
        s.timing.draft += draft
        s.timing.verify += verify
        s.timing.walk += walked
        s.timing.rest += rest
