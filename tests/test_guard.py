"""A drafter that stops paying is switched off with a warning, and no text changes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.engine.guard import Guard
from secondguess.engine.speculate import GREEDY, Draw, Plain, Roots
from secondguess.types import DraftTree, Output, Request, Speculation, Verdict
from tiny_folder import save_tiny


class Pairs(Plain):
    """Guesses one token for each request."""

    def draft(self, roots: Roots) -> DraftTree:
        lone = super().draft(roots)
        tensors = {name: x for name in DraftTree.__slots__ if isinstance(x := getattr(lone, name), torch.Tensor)}
        twice: dict[str, Any] = {name: torch.cat((x, x), 1) for name, x in tensors.items()}
        return DraftTree(**twice)

    def steps_for(self, slot: int) -> int:
        return 1


def cycle(guard: Guard, slots: tuple[int, ...], tokens: int, seconds: float, draw: Draw = GREEDY) -> bool:
    """Whether it drafts. A draft brings ``tokens`` in ``seconds``, plain decoding one in a second."""
    roots = Roots(slots, (1,) * len(slots), ([1],) * len(slots), (draw,) * len(slots))
    tree = guard.draft(roots)
    drafted = tree.tokens_RN.shape[1] > 1
    assert guard.steps_for(slots[0]) == int(drafted)
    emitted_R = torch.full((len(slots),), tokens if drafted else 1)
    nothing_RD = torch.zeros(len(slots), 1, dtype=torch.int64)
    guard.learn(tree, Verdict(nothing_RD, nothing_RD, emitted_R), seconds if drafted else 1.0)
    return drafted


def share(guard: Guard, tokens: int, seconds: float, cycles: int = 600, slots: tuple[int, ...] = (0,)) -> float:
    """Of the cycles, those that draft."""
    return sum(cycle(guard, slots, tokens, seconds) for _ in range(cycles)) / cycles


def told(wish: Speculation) -> Guard:
    guard = Guard("pr", Pairs())
    guard.admit(0, wish, None)
    return guard


def test_a_drafter_that_pays_goes_on(caplog) -> None:
    assert share(told(Speculation()), tokens=2, seconds=1.4) > 0.9
    assert not caplog.text


def test_a_drafter_that_never_pays_is_switched_off_with_one_warning(caplog) -> None:
    guard = told(Speculation())
    assert share(guard, tokens=2, seconds=3.0) < 0.2
    assert guard.paused
    assert caplog.text.count("method pr is slower than plain decoding in batches of 1") == 1


def test_a_drafter_that_stops_paying_is_found_out_and_taken_back_when_it_pays_again(caplog) -> None:
    guard = told(Speculation())
    assert share(guard, tokens=2, seconds=1.2) > 0.9
    assert share(guard, tokens=2, seconds=3.0, cycles=1500) < 0.5
    assert caplog.text.count("slower than plain") == 1
    share(guard, tokens=2, seconds=1.2, cycles=2000)
    assert share(guard, tokens=2, seconds=1.2) > 0.9
    assert not guard.paused
    share(guard, tokens=2, seconds=3.0, cycles=1500)
    assert caplog.text.count("slower than plain") == 2


@pytest.mark.parametrize("wish", [Speculation("pr"), Speculation(budget=3)])
def test_whoever_asks_for_it_is_drafted_for(wish: Speculation, caplog) -> None:
    guard = told(wish)
    assert share(guard, tokens=1, seconds=9.0) == 1
    assert share(guard, tokens=1, seconds=9.0, slots=(0, 1)) == 1, "and so are those that share the batch"
    assert not caplog.text
    guard.release(0)
    assert share(guard, tokens=1, seconds=9.0) < 0.2


def test_batches_of_each_size_and_temperature_are_judged_by_themselves() -> None:
    guard = told(Speculation())
    assert share(guard, tokens=1, seconds=9.0, slots=(0, 1)) < 0.2
    assert guard.paused
    assert share(guard, tokens=2, seconds=1.2) > 0.9
    assert not guard.paused
    hot = [cycle(guard, (0, 1), 2, 1.2, Draw(1.0, 0)) for _ in range(32)]
    assert sum(hot) > 0.7 * len(hot)


async def read(llm: LLM, request: Request) -> Output:
    outputs = [delta.output async for delta in llm.answer(request)]
    assert outputs[-1] is not None
    return outputs[-1]


def test_a_random_drafter_is_left_out_by_a_server(tmp_path, caplog) -> None:
    """Its guesses are wrong, and cost several times what plain decoding does."""
    save_tiny(tmp_path)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    plain = LLM(tmp_path / "target", method="ar")
    tree = TreeConfig(budget=40, num_steps=6)
    llm = LLM(tmp_path / "target", tmp_path / "drafters" / "pr", others=("ar",), tree=tree)
    assert not llm.paused
    with caplog.at_level(logging.WARNING):
        output = asyncio.run(read(llm, Request((5, 6, 7), params)))
    assert output.token_ids == plain.generate([[5, 6, 7]], params)[0].token_ids
    assert "method pr is slower than plain decoding" in caplog.text
    assert 0 < output.drafting.num_drafts < 150
    assert llm.paused
    asked = asyncio.run(read(llm, Request((5, 6, 7), params, speculation=Speculation("pr"))))
    assert asked.token_ids == output.token_ids
    assert asked.drafting.num_drafts == asked.drafting.num_cycles
    assert not llm.paused
