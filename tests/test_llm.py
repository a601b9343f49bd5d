"""The front door: sync, streaming and async give the same text; stops, text pieces and bad input."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import pytest
import torch

from secondguess import LLM, SamplingParams, TreeConfig, UserError
from secondguess.engine.sequence import TextStream, longest_overlap
from tiny_folder import byte_tokenizer, save_tiny

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder / "target", folder / "drafters" / "pr", tree=TREE)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder / "target", method="ar")


def test_sync_streaming_and_async_agree(llm: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    (expected,) = plain.generate("hello", params)
    (output,) = llm.generate("hello", params)
    assert output.token_ids == expected.token_ids
    deltas = list(llm.stream("hello", params))
    assert tuple(t for d in deltas for t in d.token_ids) == expected.token_ids
    assert "".join(d.text for d in deltas) == expected.text == output.text
    assert deltas[-1].output is not None
    assert deltas[-1].output.origins == output.origins
    assert all(len(d.token_ids) == len(d.origins) for d in deltas)

    async def collect() -> list[str]:
        async def one(prompt: str) -> str:
            return "".join([d.text async for d in llm.agenerate(prompt, params)])

        return await asyncio.gather(*(one(p) for p in ("hello", "other", "hello")))

    first, other, second = asyncio.run(collect())
    assert first == second == expected.text
    assert other == plain.generate("other", params)[0].text


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, plain: LLM) -> None:
    prompts = ["a", "bb bb bb", [3, 4, 5], "c" * 30]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 3, 17, 9)]
    outputs = llm.generate(prompts, params)
    assert [len(o.token_ids) for o in outputs] == [30, 3, 17, 9]
    assert [o.token_ids for o in outputs] == [
        plain.generate([p], [q])[0].token_ids for p, q in zip(prompts, params, strict=True)
    ]


def test_a_seed_is_drawn_and_reported(llm: LLM, plain: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(temperature=1.0, max_tokens=10))
    again = SamplingParams(temperature=1.0, max_tokens=10, seed=output.seed)
    assert plain.generate("hello", again)[0].token_ids == output.token_ids


def test_closing_a_stream_frees_its_slot(llm: LLM) -> None:
    stream = llm.stream("hello", LONG)
    next(stream)
    stream.close()
    assert not llm._scheduler.busy
    assert len(llm._scheduler.free) == llm.engine.cache.num_slots


def test_stop_strings_cut_the_text_inside_an_accepted_path(llm: LLM, plain: LLM) -> None:
    """Whatever two or three characters of the plain text: the text ends before them, however tokens were grouped."""
    (whole,) = plain.generate("hello", LONG)
    for at in range(4, 30, 5):
        stop = whole.text[at : at + 3]
        if not stop.isprintable():
            continue
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
        (output,) = llm.generate("hello", params)
        assert output.finish_reason == "stop"
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.token_ids == plain.generate("hello", params)[0].token_ids
        assert "".join(d.text for d in llm.stream("hello", params)) == output.text


def test_min_tokens_keeps_stops_away(llm: LLM) -> None:
    (whole,) = llm.generate("hello", LONG)
    stop = whole.token_ids[2]
    early = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    late = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,), min_tokens=12)
    assert llm.generate("hello", early)[0].token_ids == whole.token_ids[:3]
    assert len(llm.generate("hello", late)[0].token_ids) >= 12


def test_stats_add_up(llm: LLM) -> None:
    (output,) = llm.generate("hello", LONG)
    stats = output.stats
    assert stats.num_tokens == 39
    assert stats.num_tokens <= stats.num_accepted + stats.num_cycles <= stats.num_tokens + TREE.num_steps
    assert stats.acceptance_length == (stats.num_accepted + stats.num_cycles) / stats.num_cycles
    assert stats.decode_s == pytest.approx(stats.draft_s + stats.verify_s + stats.walk_s + stats.rest_s)
    assert all(getattr(stats, f.name) >= 0 for f in fields(stats))


def test_unfinished_characters_are_held_back() -> None:
    tokenizer = byte_tokenizer()
    stream, pieces = TextStream(tokenizer), []
    for token in tokenizer.encode("ab\u00e9\u20acz"):
        before = stream.text
        stream.push(token)
        pieces.append(stream.text[len(before) :])
    assert pieces == ["a", "b", "", "\u00e9", "", "", "\u20ac", "z"]


def test_the_end_of_a_text_that_may_become_a_stop_string() -> None:
    assert longest_overlap("one two", "two three") == 3
    assert longest_overlap("one tw", "two") == 2
    assert longest_overlap("two", "two") == 0  # whole stops are cut elsewhere
    assert longest_overlap("", "two") == 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda f: LLM(f / "nowhere", method="ar"), "nowhere"),
        (lambda f: LLM(f / "target", method="prr"), "did you mean pr"),
        (lambda f: LLM(f / "target", method="pr:budgt=3"), "did you mean budget"),
        (lambda f: LLM(f / "target", method="eagle3.1:m=2"), "only pr reconsiders"),
        (lambda f: LLM(f / "target", f / "drafters" / "eagle3.1", method="pr"), "no self-query"),
        (lambda f: LLM(f / "target", f / "drafters" / "other"), "trained for another"),
        (lambda f: LLM(f / "target", "missing"), "no drafter 'missing'"),
        (lambda f: LLM(f / "target", method="ar", max_model_len=10**9), "max_model_len"),
        (lambda f: LLM(f / "target", method="ar", max_batch_size=0), "max_batch_size"),
    ],
)
def test_what_does_not_fit_is_refused(folder, make, match: str) -> None:
    with pytest.raises(UserError, match=match):
        make(folder)


def test_an_eagle_method_runs_a_pr_drafter_at_level_0(folder) -> None:
    eagle = LLM(folder / "target", folder / "drafters" / "pr", method="eagle3.1", tree=TREE)
    zero = LLM(folder / "target", folder / "drafters" / "pr", method="pr:m=0", tree=TREE)
    for one, two in zip(eagle.stream("hello", LONG), zero.stream("hello", LONG), strict=True):
        assert one.token_ids == two.token_ids
        if eagle.engine.last and zero.engine.last:  # the first delta is the prefill's
            assert torch.equal(eagle.engine.last.tree.tokens_RN, zero.engine.last.tree.tokens_RN)
    assert eagle.engine.last
    assert zero.engine.last
