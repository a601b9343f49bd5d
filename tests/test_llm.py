"""The front door: sync, streaming and async give the same text; stops, text pieces and bad input."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from secondguess import LLM, SamplingParams, TreeConfig, UserError
from secondguess.config import Reconsider
from secondguess.engine.sequence import TextStream, longest_overlap
from secondguess.engine.thread import run, submit
from secondguess.prompts import encode
from tiny_folder import byte_tokenizer

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def odd(value: Any) -> Any:
    """A value of a type that the checker would not let pass."""
    return value


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder / "target", folder / "drafters" / "pr", tree=TREE)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder / "target", method="ar")


def assert_idle(llm: LLM) -> None:
    """Nothing waits or runs, and all slots are free, once the engine's thread has done what it was asked."""
    run(int)
    assert not llm._scheduler.busy
    assert sorted(llm._scheduler.free) == list(range(llm.engine.cache.num_slots))


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
    assert_idle(llm)


def test_streams_may_be_read_in_turns_and_one_after_the_other(llm: LLM, plain: LLM) -> None:
    """Whoever steps the engine moves all requests; what another reader's step finished is not lost."""
    prompts = ["hello", "other", "third"]
    expected = [plain.generate(p, LONG)[0] for p in prompts]
    first, second, third = (llm.stream(p, LONG) for p in prompts)
    deltas = [[next(first)], [next(second)], [next(third)]]
    for one, two in zip_longest(first, second):
        deltas[0] += [one] if one else []
        deltas[1] += [two] if two else []
    deltas[2] += list(third)
    for got, output in zip(deltas, expected, strict=True):
        assert "".join(d.text for d in got) == output.text
        assert tuple(t for d in got for t in d.token_ids) == output.token_ids
        assert [d.finish_reason for d in got] == [None] * (len(got) - 1) + ["length"]
        assert got[-1].output
        assert got[-1].output.token_ids == output.token_ids
    assert len(deltas[2]) < len(deltas[0])
    assert_idle(llm)


def test_a_slow_async_reader_misses_nothing(llm: LLM, plain: LLM) -> None:
    async def read(prompt: str, pause: float) -> str:
        text = ""
        async for delta in llm.agenerate(prompt, LONG):
            text += delta.text
            await asyncio.sleep(pause)
        return text

    async def both() -> list[str]:
        return list(await asyncio.gather(read("hello", 0.2), read("other", 0.0)))

    assert asyncio.run(both()) == [plain.generate(p, LONG)[0].text for p in ("hello", "other")]
    assert_idle(llm)


def test_cancelling_while_the_engine_is_busy_frees_the_request(llm: LLM) -> None:
    async def cancelled() -> None:
        gate = threading.Event()
        submit(gate.wait)  # so that the request cannot be queued before it is cancelled
        task = asyncio.create_task(anext(llm.agenerate("hello", LONG)))
        await asyncio.sleep(0.01)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert_idle(llm)


def test_one_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(UserError, match="empty"):
        llm.generate(["ok", ""])
    assert_idle(llm)


def test_a_fault_ends_the_readers_of_its_batch_and_no_others(llm: LLM, plain: LLM, monkeypatch) -> None:
    stream = llm.stream("hello", LONG)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.speculator, "draft", lambda roots: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("other", LONG)
    (last,) = stream
    assert last.finish_reason == "abort"
    assert_idle(llm)
    assert llm.generate("hello", LONG)[0].text == plain.generate("hello", LONG)[0].text


@pytest.mark.parametrize("min_tokens", [0, 9])
@pytest.mark.parametrize("at", [2, 7, 16])
def test_stop_strings_depend_on_neither_method_nor_streaming(folder, llm: LLM, plain: LLM, at: int, min_tokens) -> None:
    """They cut the plain text, the same way whatever was accepted and handed out together."""
    whole = stop_text(plain)
    stop = (whole[at : at + 2], whole[at : at + 5])
    params = replace(STOPPABLE, stop=stop, min_tokens=min_tokens)
    begin = min(b for b in (whole.find(s, max(0, min_tokens - len(s))) for s in stop) if b >= 0)
    for method in (plain, llm, LLM(folder / "target", method="ngram", tree=TREE)):
        (output,) = method.generate("hello", params)
        assert (output.text, output.finish_reason) == (whole[:begin], "stop")
        deltas = list(method.stream("hello", params))
        assert "".join(d.text for d in deltas) == output.text
        assert tuple(t for d in deltas for t in d.token_ids) == output.token_ids
        assert len(output.token_ids) >= min_tokens


STOPPABLE = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, logit_bias={69: 100.0, 70: 99.0})


def stop_text(plain: LLM) -> str:
    """Two letters in a random order: one byte is one character, and every stop string comes again."""
    (output,) = plain.generate("hello", STOPPABLE)
    assert len(set(output.text)) == 2
    assert len(output.text) == 60
    return output.text


def test_a_text_that_was_cut_gets_no_unfinished_character_after_it() -> None:
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    for token in tokenizer.encode("ab\u20ac")[:-1]:
        stream.push(token)
    stream.cut(1)
    stream.flush()
    assert stream.text == "a"


def test_prompts_as_text_ids_and_messages(llm: LLM, plain: LLM) -> None:
    """The byte tokenizer adds nothing to text; the template ends a message with a new line."""
    ids = llm.encode("ab\n")
    assert ids == llm.encode([{"role": "user", "content": "ab"}]) == llm.encode(list(ids))
    outputs = [plain.generate(p, LONG)[0] for p in ("ab\n", ids, [{"role": "user", "content": "ab"}])]
    assert [o.prompt for o in outputs] == ["ab\n"] * 3
    assert len({o.token_ids for o in outputs}) == 1


def test_raw_text_gets_the_special_tokens_of_the_tokenizer_and_a_conversation_those_of_its_template() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}<end>{{ m['content'] }}{% endfor %}")
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    assert encode(tokenizer, "a") == (0, *encode(tokenizer, "a")[1:])
    assert encode(tokenizer, [{"role": "user", "content": "a"}]) == encode(tokenizer, "a")


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
        (lambda f: LLM(f / "target", method="eagle3.1:m=2"), r"only pr, hass\+pr do"),
        (lambda f: LLM(f / "target", f / "drafters" / "eagle3.1", method="pr"), "no self-query"),
        (lambda f: LLM(f / "target", f / "drafters" / "other"), "trained for another"),
        (lambda f: LLM(f / "target", "missing"), "no drafter 'missing'"),
        (lambda f: LLM(f / "target", method="ar", max_model_len=10**9), "max_model_len"),
        (lambda f: LLM(f / "target", method="ar", max_batch_size=0), "max_batch_size"),
        (lambda f: LLM(f / "target", method="ar", max_batch_size=odd(1.5)), "max_batch_size must be a whole number"),
        (lambda f: LLM(f / "target", method="ar", max_model_len=odd(12.5)), "max_model_len must be a whole number"),
        (lambda f: TreeConfig(budget=odd("8")), "budget must be a whole number or auto, got '8'"),
        (lambda f: TreeConfig(num_reconsider=True), "num_reconsider must be a whole number, got True"),
        (lambda f: TreeConfig(reconsider=Reconsider(propagate=odd("no"))), "propagate must be true or false, got 'no'"),
        (lambda f: TreeConfig(reconsider=Reconsider(reconsider_cap=odd(2.0))), "reconsider_cap must be a whole number"),
        (lambda f: LLM(f / "target", f / "drafters" / "pr", method="ngram"), "uses no drafter"),
    ],
)
def test_what_does_not_fit_is_refused(folder, make, match: str) -> None:
    with pytest.raises(UserError, match=match):
        make(folder)


def test_a_forked_process_is_told_so(llm: LLM) -> None:
    """The engine's thread does not come along, so waiting for it would have no end."""
    llm.generate("hello", SamplingParams(max_tokens=1))
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            try:
                llm.generate("hello")
            except RuntimeError as error:
                os._exit(7 if "spawn" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_eagle_method_runs_a_pr_drafter_at_level_0(folder) -> None:
    eagle = LLM(folder / "target", folder / "drafters" / "pr", method="eagle3.1", tree=TREE)
    zero = LLM(folder / "target", folder / "drafters" / "pr", method="pr:m=0", tree=TREE)
    for one, two in zip(eagle.stream("hello", LONG), zero.stream("hello", LONG), strict=True):
        assert one.token_ids == two.token_ids
        if eagle.last_trace and zero.last_trace:  # the first delta is the prefill's
            assert torch.equal(eagle.last_trace.tree.tokens_RN, zero.last_trace.tree.tokens_RN)
    assert eagle.last_trace
    assert zero.last_trace


def test_a_method_may_name_its_drafter(folder) -> None:
    pr = folder / "drafters" / "pr"
    named = LLM(folder / "target", method=f"eagle3.1:drafter={pr},num_steps=3", tree=TREE)
    given = LLM(folder / "target", pr, method="eagle3.1:num_steps=3", tree=TREE)
    for one, two in zip(named.stream("hello", LONG), given.stream("hello", LONG), strict=True):
        assert one.token_ids == two.token_ids
        if named.last_trace and given.last_trace:
            assert torch.equal(named.last_trace.tree.tokens_RN, given.last_trace.tree.tokens_RN)
    with pytest.raises(UserError, match="names its own drafter: leave drafter out"):
        LLM(folder / "target", pr, method=f"eagle3.1:drafter={pr}")
    with pytest.raises(UserError, match="drafter needs a folder"):
        LLM(folder / "target", method="eagle3.1:drafter=")
    with pytest.raises(UserError, match="ngram does not use drafter"):
        LLM(folder / "target", method=f"ngram:drafter={pr}")


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ({"role": "user", "content": "hi"}, None, "a conversation is a list of messages"),
        (3, None, "a prompt is text, token ids or messages, got 3"),
        ([[["hi"]]], None, "here it is a list of something else"),
        ([[{"role": "user", "contnt": "hi"}]], None, "a message needs 'content', a text"),
        ("half \ud800", None, "is no Unicode text at character 5"),
        ("hi", {"max_tokens": 3}, "params must be SamplingParams"),
    ],
)
def test_what_is_no_prompt_is_said_in_one_line(llm: LLM, prompts, params, said: str) -> None:
    with pytest.raises(UserError, match=said):
        llm.generate(prompts, params)
    assert_idle(llm)


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)  # type: ignore[arg-type]
