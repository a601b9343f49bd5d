"""The default target and the drafters that ship for it: what a newcomer's first command relies on."""

from __future__ import annotations

import asyncio

import pytest

from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.drafter.shipped import SHIPPED, shipped_for
from secondguess.target.load import load_target
from secondguess.types import Output, Request, Speculation

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("default target")]
QUESTIONS = ("A shelf holds 7 rows of 9 jars. How many jars are there?", "Name three birds that cannot fly.")
TREE = TreeConfig(budget=16)


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2-135m")


@pytest.fixture(scope="module")
def plain(target) -> LLM:
    return LLM(target, method="ar", max_batch_size=2, max_model_len=256)


def prompts(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.encode([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.mark.parametrize("method", ["eagle3.1", "pr"])
def test_shipped_drafters_keep_the_text_and_guess_well(target, plain: LLM, method: str) -> None:
    llm = LLM(target, method=method, tree=TREE, max_batch_size=2, max_model_len=256)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
        expected = [plain.generate(prompt, params)[0].token_ids for prompt in prompts(llm)]
        together = llm.generate(prompts(llm), params)
        assert [output.token_ids for output in together] == expected
        if temperature == 0:
            cycles = sum(output.stats.num_cycles for output in together)
            accepted = sum(output.stats.num_accepted for output in together)
            assert 1 + accepted / cycles > 1.7


def test_both_drafters_ship_and_are_small(target) -> None:
    assert set(shipped_for(target.embedding)) == {"eagle3.1", "pr"}
    assert all(path.stat().st_size < 25e6 for path in SHIPPED.rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_prompts_up_to_the_end_of_the_context(target) -> None:
    """Of its 8,192 positions: one prompt leaves a single one, the other twelve, where trees get smaller, then end."""
    llm = LLM(target, method="pr", others=("ar",), tree=TREE, max_batch_size=1)
    text = llm.encode("A long list of birds, one after the other: heron, wren, crane, swift, plover. " * 600)
    for length in (8191, 8180):
        plain, drafted = (answer(llm, text[:length], method) for method in ("ar", "pr"))
        assert len(plain.token_ids) == 8192 - length
        assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, "length")
        assert bool(drafted.stats.num_drafted) == (length == 8180)
        assert plain.stats.num_drafted == 0


def answer(llm: LLM, prompt: tuple[int, ...], method: str) -> Output:
    async def last() -> Output | None:
        request = Request(prompt, SamplingParams(max_tokens=100, ignore_eos=True), speculation=Speculation(method))
        return [delta async for delta in llm.answer(request)][-1].output

    output = asyncio.run(last())
    assert output
    return output
