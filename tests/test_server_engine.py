"""What the engine does for a server: methods and budgets per request, log-probabilities, grammars, news for readers."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from secondguess import LLM, SamplingParams, TreeConfig, UserError
from secondguess.config import Reconsider
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.cycle import Engine
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.slots import SlotCache
from secondguess.engine.thread import run, submit
from secondguess.grammar import CompiledGrammar, Matcher
from secondguess.prompts import Chat, encode
from secondguess.target.base import causal_rows
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree.trim import PADDING, row_of, side_by_side, trim
from secondguess.types import Delta, Drafting, Output, Request, Speculation
from tiny_folder import byte_tokenizer

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
WISHES = (
    Speculation(),
    Speculation("ar"),
    Speculation("ngram"),
    Speculation("eagle3.1"),
    Speculation(budget=3),
    Speculation("pr", 1),
    Speculation("ngram", 2),
)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder / "target", method="ar")


def make_menu(folder) -> LLM:
    others = ("ar", "ngram", "eagle3.1")
    return LLM(folder / "target", folder / "drafters" / "pr", others=others, tree=TREE, max_batch_size=7)


@pytest.fixture(scope="module")
def menu(folder) -> LLM:
    return make_menu(folder)


async def read(llm: LLM, request: Request) -> Output:
    outputs = [delta.output async for delta in llm.answer(request)]
    assert outputs[-1] is not None
    return outputs[-1]


async def read_all(llm: LLM, requests: list[Request]) -> list[Output]:
    return list(await asyncio.gather(*(read(llm, request) for request in requests)))


def answers(llm: LLM, requests: list[Request]) -> list[Output]:
    return asyncio.run(read_all(llm, requests))


# Trees


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "reconsider", [Reconsider(), Reconsider(propagate=False), Reconsider(merge="replace"), Reconsider(merge="append")]
)
def test_a_trimmed_tree_is_that_of_the_smaller_budget(seed: int, reconsider: Reconsider) -> None:
    target = tiny_target("llama", seed, vocab_size=24)
    trees = []
    for budget in (14, 5, 1):
        config = TreeConfig(budget=budget, num_steps=4, grow_width=3, offer_width=3, reconsider=reconsider)
        engine = Engine(target, EagleSpeculator(tiny_drafter(target, seed), config, 2, 96), target.new_cache(2, 96))
        scheduler = Scheduler(engine, 64)
        for prompt in ((1, 2, 3), (seed + 1,)):
            scheduler.submit(scheduler.prepare(Request(prompt, LONG)))
        for _ in range(3):  # two prompts and a cycle
            scheduler.step()
        assert engine.last is not None
        trees.append(engine.last.tree)
    large, *smaller = trees
    for small, budget in zip(smaller, (5, 1), strict=True):
        for r in range(2):
            assert_same(trim(large, r, budget), row_of(small, r))


def assert_same(one, other) -> None:
    """But for padding at the end."""
    size = int(other.valid_RN.sum())
    assert int(one.valid_RN.sum()) == size
    for name in PADDING:
        assert torch.equal(getattr(one, name)[:, :size], getattr(other, name)[:, :size]), name


def test_trees_side_by_side_are_what_they_were_alone() -> None:
    target = tiny_target("llama", 1, vocab_size=24)
    config = TreeConfig(budget=6, num_steps=3)
    engine = Engine(target, EagleSpeculator(tiny_drafter(target), config, 3, 96), target.new_cache(3, 96))
    scheduler = Scheduler(engine, 64)
    for prompt in ((1, 2, 3), (5,), (7, 7)):
        scheduler.submit(scheduler.prepare(Request(prompt, LONG)))
    for _ in range(4):
        scheduler.step()
    assert engine.last is not None
    tree = engine.last.tree
    mixed = side_by_side([row_of(tree, 2), trim(tree, 0, 2), row_of(tree, 1)], [2, 0, 1])
    for r, alone in enumerate((trim(tree, 0, 2), row_of(tree, 1), row_of(tree, 2))):
        assert_same(row_of(mixed, r), alone)
    assert not mixed.valid_RN[0, 3:].any()
    assert (mixed.parents_RN[0, 3:] == -1).all()


# Methods


@pytest.mark.parametrize("seed", range(6))
def test_batch_mates_with_different_methods_write_plain_decodings_text(menu: LLM, plain: LLM, seed: int) -> None:
    rng, requests = random.Random(seed), []
    for choice, wish in enumerate(rng.sample(WISHES, len(WISHES))):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=seed,
            max_tokens=rng.randrange(5, 40),
            ignore_eos=True,
            presence_penalty=rng.choice([0.0, 0.5]),
        )
        prompt = tuple(rng.randrange(1, 257) for _ in range(rng.randrange(1, 30)))
        requests.append(Request(prompt, params, choice, speculation=wish))
    outputs = answers(menu, requests)
    for request, output in zip(requests, outputs, strict=True):
        alone = answers(plain, [replace(request, speculation=Speculation())])[0]
        assert output.token_ids == alone.token_ids, request.speculation
        drafted = max(drafted for drafted, _ in output.drafting.cycles)
        limit = 0 if request.speculation.method == "ar" else request.speculation.budget or TREE.max_budget
        assert drafted <= limit


def test_each_request_is_drafted_for_by_its_method(menu: LLM) -> None:
    """The text says nothing of that, but the counts do."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [Request((5, 6, 5, 6, 5), params, speculation=wish) for wish in WISHES]
    pr, ar, ngram, eagle, three, one, two = (output.drafting for output in answers(menu, requests))
    assert ar.num_drafts == 0
    assert ngram == answers(menu, [requests[2]])[0].drafting
    assert ngram.num_drafted > two.num_drafted > 0
    assert (pr.num_drafted_refined > 0, eagle.num_drafted_refined) == (True, 0)
    for drafting, budget in ((eagle, 12), (three, 3), (one, 1)):
        assert {drafted for drafted, _ in drafting.cycles} == {budget}
    assert {drafted for drafted, _ in pr.cycles} <= {0, 12}  # 0 where it was alone, and drafting did not pay


def test_counts_add_up(menu: LLM) -> None:
    before = menu.totals
    outputs = answers(menu, [Request((3, 4, 5), LONG, choice, speculation=w) for choice, w in enumerate(WISHES)])
    after, total = menu.totals, Drafting()
    for output in outputs:
        total.cycles += output.drafting.cycles
        assert output.drafting.num_cycles == output.stats.num_cycles
        assert output.drafting.num_accepted == output.stats.num_accepted
        assert output.drafting.num_accepted_refined <= output.drafting.num_drafted_refined
    assert after.drafting.cycles - before.drafting.cycles == total.cycles
    assert after.num_tokens - before.num_tokens == sum(len(output.token_ids) for output in outputs)
    assert after.num_prompt_tokens - before.num_prompt_tokens == 3 * len(outputs)


def test_drafting_counts() -> None:
    d = Drafting()
    for row in ((4, 2, 1, 1), (4, 0, 2, 0), (0, 0, 0, 0), (3, 2, 0, 0)):
        d.count(*row, num_steps=2)
    assert d.cycles == Counter({(4, 2): 1, (4, 0): 1, (0, 0): 1, (3, 2): 1})
    assert (d.num_cycles, d.num_drafts, d.num_drafted, d.num_accepted) == (4, 3, 11, 4)
    assert (d.num_drafted_refined, d.num_accepted_refined, d.num_steps) == (3, 1, 8)
    assert d.acceptance_length == 1 + 4 / 3
    assert Drafting().acceptance_length == 1


@pytest.mark.parametrize("part", ["draft", "accept", "release"])
def test_a_drafter_that_raises_is_switched_off_and_no_text_changes(folder, plain: LLM, part: str, caplog) -> None:
    llm = make_menu(folder)

    def fail(*_):
        raise RuntimeError("no such kernel")

    setattr(llm.engine.speculator.speculators["pr"], part, fail)  # type: ignore[attr-defined]
    wishes = (Speculation(), Speculation("eagle3.1"), Speculation("pr", 4))
    requests = [Request((9, 8, 7), LONG, choice, speculation=wish) for choice, wish in enumerate(wishes)]
    with caplog.at_level(logging.WARNING):
        outputs = answers(llm, requests)
    assert "method pr failed and is switched off" in caplog.text
    assert llm.switched_off == {"pr": "RuntimeError: no such kernel"}
    for request, output in zip(requests, outputs, strict=True):
        assert output.token_ids == answers(plain, [replace(request, speculation=Speculation())])[0].token_ids
    assert outputs[1].drafting.num_drafts > 0
    assert answers(llm, requests)[0].drafting.num_drafts == 0
    run(int)
    assert sorted(llm._scheduler.free) == [*range(7)]


def test_a_drafter_that_cannot_learn_is_switched_off(folder, plain: LLM) -> None:
    llm = make_menu(folder)
    llm.engine.speculator.speculators["pr"].learn = lambda *_: 1 / 0  # type: ignore[attr-defined]
    requests = [Request((9, 8, 7), LONG, speculation=Speculation("pr"))]
    for num_drafts in (1, 0):
        (output,) = answers(llm, requests)
        assert output.token_ids == answers(plain, [replace(requests[0], speculation=Speculation())])[0].token_ids
        assert output.drafting.num_drafts == num_drafts
    assert llm.switched_off == {"pr": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Speculation("prr"), "no method 'prr' here; did you mean pr"),
        (Speculation("hass"), "there are"),
        (Speculation("ar", 3), "of no use to ar"),
        (Speculation("pr", 0), r"budget must be in \[1, 12\]"),
        (Speculation(None, 13), r"budget must be in \[1, 12\]"),
    ],
)
def test_wishes_that_cannot_be_met(menu: LLM, wish: Speculation, said: str) -> None:
    with pytest.raises(UserError, match=said):
        menu.answer(Request((1,), LONG, speculation=wish))


def test_an_llm_of_one_method_offers_no_other(plain: LLM) -> None:
    with pytest.raises(UserError, match="offers one method"):
        plain.answer(Request((1,), LONG, speculation=Speculation("ar")))


# News for readers


def test_a_cancelled_reader_frees_its_slot_within_a_cycle(menu: LLM, monkeypatch) -> None:
    steps, step = Counter(), menu._pump.step

    def counted() -> None:
        steps[menu._scheduler.load.num_running] += 1
        step()

    monkeypatch.setattr(menu._pump, "step", counted)
    long = SamplingParams(max_tokens=500, ignore_eos=True)

    async def leave() -> None:
        async with aclosing(menu.answer(Request((1, 2), long))) as deltas:
            await anext(deltas)
            await anext(deltas)
        before = steps.total()
        run(int)  # whatever was asked of the engine's thread before this is done
        run(int)
        assert steps.total() <= before + 1
        assert menu.load.num_running == 0

    asyncio.run(leave())


def test_waiting_requests_do_not_hold_up_the_news_of_running_ones(folder) -> None:
    llm = LLM(folder / "target", method="ar", max_batch_size=1)

    async def crowd() -> list[list[int]]:
        async def lengths(request: Request) -> list[int]:
            return [len(delta.token_ids) async for delta in llm.answer(request)]

        return await asyncio.gather(*(lengths(Request((1, 2), LONG)) for _ in range(6)))

    for lengths in asyncio.run(crowd()):
        assert lengths == [1] * 40  # a token a cycle, each told of as it comes


def test_a_fault_is_told_to_those_whom_it_ended(folder, plain: LLM, monkeypatch) -> None:
    llm = LLM(folder / "target", method="ar", max_batch_size=2)
    prompts = [(1, 2), (3, 4), (5, 6)]  # the third waits
    forward, calls = llm.target.forward, Counter()

    def failing(rows, cache, last_only=False):
        calls[last_only] += 1
        if not last_only and calls[last_only] == 5:
            raise MemoryError("no room")
        return forward(rows, cache, last_only)

    monkeypatch.setattr(llm.target, "forward", failing)

    async def all_three() -> list[Output | BaseException]:
        return await asyncio.gather(*(read(llm, Request(p, LONG)) for p in prompts), return_exceptions=True)

    first, second, third = asyncio.run(all_three())
    assert isinstance(first, MemoryError)
    assert isinstance(second, MemoryError)
    assert isinstance(third, Output)
    assert third.token_ids == plain.generate([list(prompts[2])], LONG)[0].token_ids
    assert llm.load.num_running == 0


def test_a_fault_in_prefill_ends_that_request_alone(folder, plain: LLM, monkeypatch) -> None:
    llm = LLM(folder / "target", method="ar", max_batch_size=3)
    forward = llm.target.forward

    def failing(rows, cache, last_only=False):
        if last_only and rows.tokens_RN.shape[1] == 4:
            raise MemoryError("no room")
        return forward(rows, cache, last_only)

    monkeypatch.setattr(llm.target, "forward", failing)
    prompts = [(1, 2), (3, 4, 5, 6), (5, 6)]

    async def all_three() -> list[Output | BaseException]:
        return await asyncio.gather(*(read(llm, Request(p, LONG)) for p in prompts), return_exceptions=True)

    first, second, third = asyncio.run(all_three())
    assert isinstance(second, MemoryError)
    for output, prompt in ((first, prompts[0]), (third, prompts[2])):
        assert isinstance(output, Output)
        assert output.token_ids == plain.generate([list(prompt)], LONG)[0].token_ids


def test_a_fault_in_telling_news_ends_that_request_alone(folder, plain: LLM, monkeypatch, caplog) -> None:
    llm = LLM(folder / "target", method="ar", max_batch_size=2)
    news_of = llm._pump.news_of

    def failing(s):
        if s.request.prompt_ids == (1, 2) and len(s.origins) == 4:
            raise KeyError("lost")
        return news_of(s)

    monkeypatch.setattr(llm._pump, "news_of", failing)
    requests = [Request(prompt, LONG) for prompt in ((1, 2), (3, 4), (5, 6))]  # the third waits

    async def all_three() -> list[Output | BaseException]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(read(llm, request) for request in requests), return_exceptions=True)

    first, *others = asyncio.run(all_three())
    assert isinstance(first, KeyError)
    for output, request in zip(others, requests[1:], strict=True):
        assert isinstance(output, Output)
        assert output.token_ids == answers(plain, [request])[0].token_ids
    assert "could not be told" in caplog.text
    run(int)
    assert sorted(llm._scheduler.free) == [0, 1]
    assert not llm._pump.listeners


def test_a_listener_that_raises_disturbs_nobody(folder, plain: LLM) -> None:
    llm, ended, tokens = LLM(folder / "target", method="ar", max_batch_size=2), threading.Event(), []

    def hear(i: int, news: Delta | Exception) -> None:
        if i == 0:
            raise RuntimeError("deaf")
        assert isinstance(news, Delta)
        tokens.extend(news.token_ids)
        if news.output:
            ended.set()

    llm.start([Request((1, 2), LONG), Request((3, 4), LONG)], hear)
    assert ended.wait(60)
    assert tuple(tokens) == answers(plain, [Request((3, 4), LONG)])[0].token_ids
    run(int)
    assert sorted(llm._scheduler.free) == [0, 1]
    assert len(answers(llm, [Request((1, 2), LONG)])[0].token_ids) == 40


def test_nothing_begins_unless_all_can(folder) -> None:
    llm = LLM(folder / "target", method="ar", max_batch_size=2)
    with pytest.raises(UserError, match="outside the target's vocabulary"):
        llm.start([Request((1, 2), LONG), Request((999,), LONG)], lambda *_: None)
    run(int)
    assert llm.load.num_running == llm.load.num_waiting == 0


def test_totals_are_those_of_the_newest_whole_step(folder, monkeypatch) -> None:
    """In the midst of a cycle some counts have grown, and others have not yet."""
    llm, seen = make_menu(folder), []
    learn = llm.engine.speculator.learn

    def looking(*given) -> None:
        seen.append(llm.totals.num_tokens)
        learn(*given)

    monkeypatch.setattr(llm.engine.speculator, "learn", looking)
    before = llm.totals
    (output,) = answers(llm, [Request((9, 8, 7), LONG, speculation=Speculation("pr"))])
    assert (before.num_tokens, seen[0]) == (0, 1), "the first cycle is not over"
    done = llm.totals - before
    assert done.num_tokens == len(output.token_ids) == 40
    assert done.drafting == output.drafting


def test_the_load_is_known_meanwhile(folder) -> None:
    llm = LLM(folder / "target", method="ar", max_batch_size=2, max_model_len=64)

    async def watch() -> None:
        tasks = [asyncio.create_task(read(llm, Request((1,) * 8, LONG))) for _ in range(5)]
        while llm.load.num_running < 2:
            await asyncio.sleep(0.001)
        load = llm.load
        assert load.num_running == 2
        assert 0 < load.num_waiting <= 3
        assert 0 < load.cache_used < 1
        outputs = await asyncio.gather(*tasks)
        assert outputs[-1].stats.queue_s > outputs[0].stats.queue_s

    asyncio.run(watch())
    submit(int).result()
    assert (llm.load.num_running, llm.load.num_waiting, llm.load.cache_used) == (0, 0, 0)


# Log-probabilities


def reference_logps(llm: LLM, ids: tuple[int, ...]) -> torch.Tensor:
    """Entry t: the law of token t + 1."""
    rows = causal_rows(torch.zeros(1, dtype=torch.int64), torch.tensor(ids)[None])
    cache: SlotCache = llm.target.new_cache(1, len(ids))
    return run(llm.target.forward, rows, cache).logits_RNV[0].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_own(menu: LLM, plain: LLM, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=3,
        top_k=9,
        presence_penalty=1.0,
        max_tokens=30,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
    )
    prompt = tuple(range(20, 30))
    outputs = answers(menu, [Request(prompt, params, speculation=wish) for wish in WISHES])
    (alone,) = plain.generate([list(prompt)], params)
    logps_TV = reference_logps(plain, prompt + alone.token_ids)
    for output in outputs:
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs
        assert output.prompt_logprobs == alone.prompt_logprobs
    assert [t.token for t in alone.prompt_logprobs] == list(prompt[1:])
    assert [t.token for t in alone.logprobs] == list(alone.token_ids)
    for t, row_V in zip((*alone.prompt_logprobs, *alone.logprobs), logps_TV, strict=False):
        assert t.logprob == pytest.approx(float(row_V[t.token]), abs=1e-4)
        best = row_V.topk(len(t.top))
        assert [token for token, _ in t.top] == best.indices.tolist()
        assert [logp for _, logp in t.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert {len(t.top) for t in alone.logprobs} == {4}
    assert {len(t.top) for t in alone.prompt_logprobs} == {2}


def test_logprobs_come_with_their_tokens(menu: LLM) -> None:
    params = replace(LONG, logprobs=0)
    deltas = list(menu.stream("hello", params))
    for delta in deltas:
        assert tuple(t.token for t in delta.logprobs) == delta.token_ids
        assert all(t.top == () for t in delta.logprobs)
    assert deltas[-1].output is not None
    assert tuple(t for delta in deltas for t in delta.logprobs) == deltas[-1].output.logprobs
    assert not any(delta.logprobs for delta in menu.stream("hello", LONG))


def test_a_prompt_of_one_token_has_no_logprobs(menu: LLM) -> None:
    (output,) = menu.generate([[7]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert output.prompt_logprobs == ()


# Grammars


@dataclass
class Alternating:
    """Odd and even tokens by turns, then the end token 0 and nothing else. Loses a text at ``lost_at`` tokens."""

    length: int
    lost_at: int = 1000
    texts: list[list[int]] = field(default_factory=list)

    def start(self) -> Turns:
        self.texts.append([])
        return Turns(self.length, self.lost_at, self.texts[-1])


@dataclass
class Turns:
    length: int
    lost_at: int
    text: list[int]

    @property
    def fault(self) -> Exception | None:
        return UserError("lost", "grammar") if len(self.text) >= self.lost_at else None

    def allowed(self) -> torch.Tensor | None:
        if len(self.text) > self.length:
            return None
        tokens_V = torch.arange(257)
        if len(self.text) == self.length:
            return tokens_V == 0
        return (tokens_V % 2 == (len(self.text) + 1) % 2) & (tokens_V > 0)

    def accept(self, token: int) -> None:
        self.text.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_followed_whatever_was_drafted(menu: LLM, plain: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=64, logprobs=0)
    grammar = Alternating(30)
    ruled = [Request((4, 5), params, speculation=wish, grammar=grammar) for wish in WISHES[:4]]
    free = Request((4, 5), params)
    *outputs, other = answers(menu, [*ruled, free])
    (alone,) = answers(plain, [replace(ruled[0], speculation=Speculation())])
    assert other.token_ids == plain.generate([[4, 5]], params)[0].token_ids
    for output in outputs:
        assert output.token_ids == alone.token_ids
        assert output.finish_reason == "stop"
        assert [token % 2 for token in output.token_ids] == [1, 0] * 15 + [0]
    assert len(grammar.texts) == 5  # each request follows it by itself
    assert all(tuple(text[:31]) == alone.token_ids for text in grammar.texts)


@pytest.mark.parametrize("lost_at", [1, 9])
def test_a_text_that_leaves_its_grammar_ends_alone(menu: LLM, plain: LLM, lost_at: int) -> None:
    params = SamplingParams(seed=5, max_tokens=64)
    bad, good = (Request((4, 5), params, grammar=Alternating(30, at)) for at in (lost_at, 1000))

    async def both() -> tuple[Output | BaseException, Output | BaseException]:
        return await asyncio.gather(read(menu, bad), read(menu, good), return_exceptions=True)

    lost, kept = asyncio.run(both())
    assert isinstance(lost, UserError)
    assert isinstance(kept, Output)
    assert (str(lost), kept.finish_reason) == ("lost", "stop")
    assert kept.token_ids == answers(plain, [good])[0].token_ids
    submit(int).result()
    assert menu.load.num_running == 0


class SlowMatcher:
    """Stands in for xgrammar's. Takes so much of the thread's time for the tokens, one after the other."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def fill_next_token_bitmask(self, bits_1W: torch.Tensor) -> None:
        bits_1W.fill_(-1)

    def accept_token(self, token: int) -> bool:
        end = time.thread_time() + self.seconds.pop(0)
        while time.thread_time() < end:
            pass
        return token > 0

    def is_terminated(self) -> bool:
        return False


def followed(seconds: list[float]) -> Matcher:
    library = SimpleNamespace(GrammarMatcher=SlowMatcher, allocate_token_bitmask=lambda *_: torch.zeros(1, 2).int())
    return CompiledGrammar(library, list(seconds), vocab_size=40, field="structured_outputs").start()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "num_taken"),
    [
        ([0, 0.06, 0, 0.06, 0, 0.06, 0], 7),  # one hiccup after the other
        ([0, 0.06, 0.06, 0, 0], 3),
        ([0, 0.15, 0, 0], 2),
    ],
)
def test_a_grammar_that_holds_up_the_others_ends_its_text(seconds: list[float], num_taken: int) -> None:
    matcher, taken = followed(seconds), 0
    for _ in seconds:
        allowed_V = matcher.allowed()
        taken += allowed_V is not None and bool(allowed_V.all())
        matcher.accept(7)
    assert taken == num_taken
    assert (matcher.fault is None) == (num_taken == len(seconds))
    if matcher.fault:
        assert "more than 50 ms" in str(matcher.fault)
        assert isinstance(matcher.fault, UserError)
        assert matcher.fault.field == "structured_outputs"


def test_a_token_that_its_grammar_does_not_allow_is_our_fault() -> None:
    matcher = followed([0])
    matcher.accept(0)
    assert isinstance(matcher.fault, RuntimeError)
    assert matcher.allowed() is None


# Conversations


def test_templates_get_tools_and_variables() -> None:
    tokenizer = byte_tokenizer("{{ tools | length }} {{ mood }} {{ messages[0].content }}")
    chat = Chat([{"role": "user", "content": "hi"}], [{"type": "function"}], {"mood": "fine"})
    assert tokenizer.decode(list(encode(tokenizer, chat))) == "1 fine hi"


@pytest.mark.parametrize(
    ("template", "chat", "said"),
    [
        ("{{ raise_exception('no system') }}", Chat([{"role": "system", "content": "x"}]), "no system"),
        ("x", Chat([{"role": "user", "content": "x"}], (), {"chat_template": "{{ 1 }}"}), "'chat_template' is no var"),
        ("x", Chat([{"role": "user", "content": "x"}], (), {"tokenize": True}), "'tokenize' is no variable"),
        ("x", Chat([{"role": "assistant", "content": None}]), "needs 'content'"),
        ("{{ messages[0].content + 1 }}", Chat([{"role": "user", "content": "x"}]), "does not take this conversation"),
    ],
)
def test_conversations_that_a_template_does_not_take(template: str, chat: Chat, said: str) -> None:
    with pytest.raises(UserError, match=said):
        encode(byte_tokenizer(template), chat)


def test_a_call_of_a_tool_needs_no_text() -> None:
    tokenizer = byte_tokenizer("[{{ messages[0].content }}]")
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert tokenizer.decode(list(encode(tokenizer, [message]))) == "[]"
