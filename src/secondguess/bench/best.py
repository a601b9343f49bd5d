"""PR at its best against EAGLE-3.1 at its best, where several settings of them were tried. Pure functions.

The best of many flatters: part of its lead is luck with the texts that chose it. So half of the texts choose, and the
gain is measured on the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secondguess.bench.acceptance import Tally, acceptance_length, named, paired_gain, tau_with_interval
from secondguess.bench.evaluation import Evaluation, Run

OURS, THEIRS = "pr", "eagle3.1"


def duels(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A row per budget at which one of the two has a choice; texts that loop neither choose nor count."""
    choosing, measured = halves(evaluation.runs[0].tallies)
    if not (choosing and measured):
        return []
    rows = []
    for budget in dict.fromkeys(run.shape["budget"] for run in evaluation.runs):
        sides = [candidates(evaluation.runs, name, budget) for name in (OURS, THEIRS)]
        if all(sides) and max(map(len, sides)) > 1:
            ours, theirs = (best(side, choosing) for side in sides)
            place = {"temperature": evaluation.temperature, "budget": budget}
            rows.append(place | duel(ours, theirs, measured))
    return rows


def candidates(runs: Sequence[Run], name: str, budget: int | str) -> list[Run]:
    """A method with all its settings. PR without second looks is a control, and neither."""
    same = [r for r in runs if r.method.partition(":")[0] == name and r.shape["budget"] == budget]
    return [r for r in same if name != OURS or r.shape["num_reconsider"]]


def halves(texts: Sequence[Tally]) -> tuple[list[int], list[int]]:
    """Texts of every other conversation, and of those between: so each half has its share of every task.

    Those that loop, or ended with prefill whatever the method, are in neither.
    """
    flowing = [i for i, text in enumerate(texts) if text.num_cycles and not text.looping]
    numbers = {name: n for n, name in enumerate(dict.fromkeys(texts[i].conversation for i in flowing))}
    odd = [numbers[texts[i].conversation] % 2 for i in flowing]
    first, second = ([i for i, o in zip(flowing, odd, strict=True) if o == side] for side in (0, 1))
    return first, second


def best(runs: Sequence[Run], choosing: Sequence[int]) -> Run:
    """The largest tau over the texts that choose; the first of equals."""
    return max(runs, key=lambda run: acceptance_length([run.tallies[i] for i in choosing]) or 0.0)


def duel(ours: Run, theirs: Run, measured: Sequence[int]) -> dict[str, Any]:
    mine, other = ([run.tallies[i] for i in measured] for run in (ours, theirs))
    return {
        "method": ours.method,
        "over": theirs.method,
        "num_prompts": len(measured),
        **named("acceptance_length", tau_with_interval(mine)),
        **named("acceptance_length_over", tau_with_interval(other)),
        **named("gain", paired_gain(mine, other)),
    }
