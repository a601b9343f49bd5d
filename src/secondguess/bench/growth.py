"""How a cycle's time grows with the budget, the batch, the context and the draft vocabulary, each from a base point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from secondguess.bench.script import Script, histogram
from secondguess.bench.timed import make_runner
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.replayed import ReplayedSpeculator, is_static
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.costs import CostModel
from secondguess.engine.graphs import usable
from secondguess.target.hf import HFTarget

AXES = {
    "budget": (4, 8, 16, 24, 32, 48, 63),
    "batch": (1, 2, 4, 8, 16),
    "context": (128, 512, 1024, 2048, 4096, 8000),
    "vocabulary": (1024, 2048, 4096, 8192, 16384, 32768),
}
WARM_UP, ROUNDS, CYCLES = 3, 2, 4
TAU = 3.0  # that a script plays
STEEPER = 1.25  # than in proportion from the middle of an axis to its end: more than linear


@dataclass(frozen=True, slots=True)
class Point:
    budget: int
    batch: int
    context: int
    vocabulary: int


def points(base: Point, longest: int, target_vocabulary: int) -> dict[str, list[Point]]:
    """By axis. ``longest``: the context that the target takes, less the room that measuring needs."""
    limits = {"budget": 63, "batch": 16, "context": longest, "vocabulary": target_vocabulary}
    return {
        axis: [replace(base, **{axis: value}) for value in values if value <= limits[axis]]
        for axis, values in AXES.items()
    }


def measure(
    target: HFTarget,
    drafters: Callable[[int], Drafter],
    tree: TreeConfig,
    wanted: Sequence[Point],
    on_done: Callable[[], None],
) -> dict[Point, float]:
    """Milliseconds of a cycle: of each round over all points the median, of the rounds the shortest."""
    times: dict[Point, list[float]] = {point: [] for point in wanted}
    for number in range(ROUNDS):
        for point in list(times)[:: 1 if number % 2 == 0 else -1]:
            times[point].append(
                time_point(target, drafters(point.vocabulary), replace(tree, budget=point.budget), point)
            )
            on_done()
    return {point: min(found) for point, found in times.items()}


def time_point(target: HFTarget, drafter: Drafter, tree: TreeConfig, point: Point) -> float:
    columns = room(point.context, tree)
    kind = ReplayedSpeculator if usable(target.spec.device) and is_static(tree) else EagleSpeculator
    speculator = kind(drafter, tree, point.batch, columns)
    script = Script(histogram(TAU, tree.num_steps), no_draft_token=target.spec.vocab_size - 1)
    runner = make_runner(target, speculator, script, point.batch, point.context, columns)
    runner.warm_up(WARM_UP)
    runner.run(CYCLES)
    return 1000 * median(runner.seconds)


def room(context: int, tree: TreeConfig) -> int:
    """Columns that measuring after ``context`` tokens needs."""
    return context + (WARM_UP + CYCLES) * (tree.num_steps + 1) + 1 + tree.max_budget


def predicted(costs: CostModel, tree: TreeConfig, point: Point) -> float:
    """Milliseconds, by the cost model, which does not know the vocabulary, and of the context what verifying adds."""
    draft = costs.draft_start(point.batch) + (tree.num_steps - 1) * costs.draft_step(point.batch * tree.rows_per_step)
    return 1000 * (draft + float(costs.verify(point.batch * (point.budget + 1), point.batch, point.context)))


def steeper(found: Sequence[tuple[int, float]]) -> bool:
    """Whether the last half of an axis grows more than linearly: its slope against that of the first half."""
    if len(found) < 3:
        return False
    (x0, y0), (x1, y1), (x2, y2) = found[0], found[len(found) // 2], found[-1]
    return (y2 - y1) / (x2 - x1) > STEEPER * max((y1 - y0) / (x1 - x0), y0 / x2 / 4)


def with_vocabulary(drafter: Drafter, size: int) -> Drafter:
    """Another draft vocabulary, for its cost alone: the first ``size`` tokens, the head's rows over and over."""
    config = replace(drafter.config, draft_vocab_size=size)
    ids = torch.arange(size, device=drafter.embedding.device)
    other = Drafter(config, drafter.embedding, ids).to(drafter.embedding.device, drafter.embedding.dtype)
    other.tap_index = drafter.tap_index
    state: Mapping[str, torch.Tensor] = drafter.state_dict()
    head = state["lm_head.weight"]
    other.load_state_dict({**state, "lm_head.weight": head[ids % len(head)]})
    return other.eval().requires_grad_(False)
