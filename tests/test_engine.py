"""The engine as a whole: any speculator, any batch, plain decoding's tokens."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from secondguess.config import TreeConfig
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine import prefill
from secondguess.engine.cycle import Engine
from secondguess.engine.ngram import Ngram
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.sequence import Sequence
from secondguess.engine.speculate import Plain
from secondguess.errors import UserError
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import Request, SamplingParams

MAX_LEN = 96
ROOM = 64  # columns for a draft tree


def scheduler(target, speculator, num_slots=3, max_len=MAX_LEN) -> Scheduler:
    return Scheduler(Engine(target, speculator, target.new_cache(num_slots, max_len + ROOM)), max_len)


def eagle(target, tree: TreeConfig, seed=0, num_slots=3, max_len=MAX_LEN) -> EagleSpeculator:
    return EagleSpeculator(tiny_drafter(target, seed), tree, num_slots, max_len + ROOM)


def add(s: Scheduler, request: Request) -> Sequence:
    sequence = s.prepare(request)
    s.submit(sequence)
    return sequence


def decode(target, speculator, requests, num_slots=3, max_len=MAX_LEN) -> list[Sequence]:
    s = scheduler(target, speculator, num_slots, max_len)
    sequences = [add(s, request) for request in requests]
    while s.busy:
        s.step()
    return sequences


def random_params(rng: random.Random, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        logit_bias=rng.choice([{}, {3: 1.5, 4: -2.0}]),
        seed=rng.randrange(2**40),
        max_tokens=rng.randrange(4, 14),
        min_tokens=rng.choice([0, 3]),
        stop_token_ids=rng.choice([(), (5,)]),
        ignore_eos=rng.choice([False, True]),
    )


def random_requests(rng: random.Random, vocab_size: int, temperature: float, count: int) -> list[Request]:
    return [
        Request(tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 20))), random_params(rng, temperature))
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(i, marks=pytest.mark.slow) for i in range(60, 200))])
def test_speculative_tokens_equal_plain_tokens(seed: int) -> None:
    rng = random.Random(seed)
    family = rng.choice(["llama", "qwen2", "qwen3", "gemma3"])
    dtype = rng.choice([torch.float64, torch.float32])
    target = tiny_target(family, seed, dtype, vocab_size=rng.choice([12, 40]))
    tree = TreeConfig(
        budget=rng.randrange(1, 20),
        num_steps=rng.randrange(1, 6),
        grow_width=rng.randrange(1, 5),
        offer_width=rng.randrange(1, 5),
        num_reconsider=rng.randrange(4),
    )
    for temperature in (0.0, 1.0):
        requests = random_requests(rng, target.spec.vocab_size, temperature, 3)
        plain = [decode(target, Plain(), [request])[0] for request in requests]
        for speculator in (eagle(target, tree, seed), Ngram(tree)):
            for one, many in zip(plain, decode(target, speculator, requests), strict=True):
                assert many.emitted == one.emitted
                assert many.finish_reason == one.finish_reason


def test_more_requests_than_slots_and_reuse_of_slots() -> None:
    target, rng = tiny_target("llama", 1), random.Random(1)
    requests = random_requests(rng, 64, 1.0, 9)
    speculator = eagle(target, TreeConfig(budget=12, num_steps=4), num_slots=2)
    crowd = decode(target, speculator, requests, num_slots=2)
    assert [s.emitted for s in crowd] == [decode(target, Plain(), [r])[0].emitted for r in requests]


def test_some_drafts_are_accepted_and_some_are_refined() -> None:
    """The equality above would say little if nothing were ever accepted."""
    target = tiny_target("llama", 3, vocab_size=12)
    tree = TreeConfig(budget=16, num_steps=4)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    runs = [decode(target, eagle(target, tree, seed), [Request((1, 2, 3), params)])[0] for seed in range(6)]
    assert sum(s.drafting.num_accepted for s in runs) >= 40
    assert sum(s.drafting.num_accepted_refined for s in runs) > 0


def test_aborted_request_frees_its_slot_and_leaves_the_others_alone() -> None:
    target = tiny_target("llama", 2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request((1, 2, 3), params), Request((4, 5), params)]
    s = scheduler(target, eagle(target, TreeConfig(budget=8)), num_slots=2)
    doomed, other = (add(s, r) for r in requests)
    for _ in range(4):
        s.step()
    s.abort(doomed)
    assert doomed.finish_reason == "abort"
    assert len(s.free) == 1
    while s.busy:
        s.step()
    assert other.emitted == decode(target, Plain(), [requests[1]])[0].emitted


def test_short_requests_do_not_hold_up_a_long_one() -> None:
    """They end in prefill, and the next one is there at once."""
    target = tiny_target("llama", 1)
    request = Request((1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True))
    s = scheduler(target, Plain(), num_slots=2)
    long, steps = add(s, request), 0
    while not long.finish_reason:
        while len(s.waiting) < 3:
            add(s, Request((1,), SamplingParams(max_tokens=1)))
        s.step()
        steps += 1
        assert steps <= 90
    assert long.emitted == decode(target, Plain(), [request])[0].emitted


def test_a_batch_that_forms_is_filled_at_once() -> None:
    target = tiny_target("llama", 1)
    s = scheduler(target, Plain(), num_slots=3)
    sequences = [add(s, Request((1, 2), SamplingParams(max_tokens=20, ignore_eos=True))) for _ in range(3)]
    for _ in range(3):
        s.step()
    assert [len(x.emitted) for x in sequences] == [1, 1, 1]
    s.abort(sequences[0])
    more = [add(s, Request((1, 2), SamplingParams(max_tokens=1))) for _ in range(4)]
    for _ in range(4):  # from now on a newcomer costs the others one prefill at most
        s.step()
    assert len(sequences[1].emitted) >= 3
    assert sum(bool(x.emitted) for x in more) >= 2


@pytest.mark.parametrize("seed", range(16))
def test_no_token_depends_on_the_pieces_of_a_prompt(seed: int, monkeypatch) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float64, torch.float32])
    target = tiny_target(rng.choice(["llama", "qwen2", "qwen3", "gemma3"]), seed, dtype, vocab_size=40)
    requests = random_requests(rng, 40, rng.choice([0.0, 1.0]), 5)
    requests = [replace(r, params=replace(r.params, prompt_logprobs=1, logprobs=1)) for r in requests]
    whole = [decode(target, Plain(), [request])[0] for request in requests]
    monkeypatch.setattr(prefill, "PIECE", rng.randrange(1, 8))
    for speculator in (Plain(), eagle(target, TreeConfig(budget=12, num_steps=4), seed)):
        for one, other in zip(whole, decode(target, speculator, requests), strict=True):
            assert other.emitted == one.emitted
            assert [t.token for t in other.prompt_logprobs] == [t.token for t in one.prompt_logprobs]
            pairs = zip(one.prompt_logprobs + one.logprobs, other.prompt_logprobs + other.logprobs, strict=True)
            assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)


def test_a_long_prompt_does_not_hold_up_those_that_run(monkeypatch) -> None:
    monkeypatch.setattr(prefill, "PIECE", 4)
    target = tiny_target("llama", 1)
    s = scheduler(target, Plain(), num_slots=2)
    first = add(s, Request((1, 2), SamplingParams(max_tokens=60, ignore_eos=True)))
    for _ in range(3):
        s.step()
    before = len(first.emitted)
    second = add(s, Request(tuple(range(1, 41)), SamplingParams(max_tokens=5, ignore_eos=True)))
    s.step()
    assert s.reading
    assert (s.load.num_running, s.load.num_waiting) == (2, 0)
    while not second.emitted:
        s.step()
    assert len(first.emitted) - before == 9, "a token between each two of ten pieces"
    while s.busy:
        s.step()
    assert second.emitted == decode(target, Plain(), [second.request])[0].emitted


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_a_prompt_that_is_given_up_between_its_pieces(how: str, monkeypatch) -> None:
    monkeypatch.setattr(prefill, "PIECE", 4)
    target = tiny_target("llama", 1)
    s = scheduler(target, Plain(), num_slots=1)
    first, second = (add(s, Request((*range(1, 20), n), SamplingParams(max_tokens=5))) for n in (1, 2))
    s.step()
    if how == "aborted":
        s.abort(first)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(target, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                s.step()
    assert (first.finish_reason, s.reading, *s.free) == ("abort", None, 0)
    while s.busy:
        s.step()
    assert second.emitted == decode(target, Plain(), [second.request])[0].emitted


def test_no_slot_is_lost_when_a_drafter_does_not_let_go() -> None:
    class Clinging(Plain):
        def release(self, slot: int) -> None:
            raise RuntimeError("no")

    target = tiny_target("llama", 1)
    s = scheduler(target, Clinging(), num_slots=2)
    for _ in range(2):
        add(s, Request((1, 2), SamplingParams(max_tokens=2, ignore_eos=True)))
    while s.busy:
        try:
            s.step()
        except RuntimeError:
            continue
    assert sorted(s.free) == [0, 1]


def fail_once(owner, name: str, call: int, monkeypatch) -> None:
    """Let call number ``call`` (from 0) of a method do its work and then raise."""
    method, calls = getattr(owner, name), itertools.count()

    def failing(*args, **kwargs):
        result = method(*args, **kwargs)
        if next(calls) == call:
            raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(("owner", "name"), [("target", "forward"), ("speculator", "accept")])
def test_a_fault_in_prefill_ends_that_request_alone(owner: str, name: str, monkeypatch) -> None:
    target = tiny_target("llama", 2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    s = scheduler(target, eagle(target, TreeConfig(budget=8), num_slots=2), num_slots=2)
    other = add(s, Request((4, 5), params))
    s.step()
    doomed, late = (add(s, Request(prompt, params)) for prompt in ((1, 2, 3), (6,)))
    with monkeypatch.context() as patch:
        fail_once(getattr(s.engine, owner), name, 0, patch)
        with pytest.raises(RuntimeError, match="out of memory"):
            s.step()
    assert (doomed.finish_reason, len(s.free)) == ("abort", 1)
    while s.busy:
        s.step()
    for survivor in (other, late):
        assert survivor.emitted == decode(target, Plain(), [survivor.request])[0].emitted
    assert sorted(s.free) == [0, 1]


@pytest.mark.parametrize(
    ("owner", "name"), [("speculator", "draft"), ("target", "forward"), ("cache", "compact"), ("speculator", "accept")]
)
def test_a_fault_in_a_cycle_ends_its_batch_and_the_next_ones_start_anew(owner: str, name: str, monkeypatch) -> None:
    target = tiny_target("llama", 2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    s = scheduler(target, eagle(target, TreeConfig(budget=8), num_slots=2), num_slots=2)
    batch = [add(s, Request(prompt, params)) for prompt in ((1, 2, 3), (4, 5))]
    for _ in range(3):
        s.step()
    waiting = add(s, Request((6,), params))
    with monkeypatch.context() as patch:
        fail_once(getattr(s.engine, owner), name, 1, patch)
        s.step()
        with pytest.raises(RuntimeError, match="out of memory"):
            s.step()
    assert [b.finish_reason for b in batch] == ["abort", "abort"]
    assert sorted(s.free) == [0, 1]
    while s.busy:
        s.step()
    assert waiting.emitted == decode(target, Plain(), [waiting.request])[0].emitted


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_contexts_of_several_attention_blocks_and_a_batch_of_four(family: str) -> None:
    """Stable attention goes through the context in blocks of 128 positions; the prompts and answers cross borders."""
    target, rng = tiny_target(family, 5, torch.float32), random.Random(5)
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True)
    requests = [Request(tuple(rng.choices(range(64), k=n)), params) for n in (120, 250, 3, 371)]
    plain = [decode(target, Plain(), [r], max_len=400)[0].emitted for r in requests]
    speculator = eagle(target, TreeConfig(budget=24, num_steps=4), num_slots=4, max_len=400)
    assert [s.emitted for s in decode(target, speculator, requests, 4, 400)] == plain
    assert [len(emitted) for emitted in plain] == [24] * 4


def test_choices_draw_other_noise_and_each_equals_plain_decoding() -> None:
    target = tiny_target("llama", 6)
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=16, ignore_eos=True)
    requests = [Request((1, 2, 3), params, choice) for choice in range(4)]
    plain = [decode(target, Plain(), [r])[0].emitted for r in requests]
    speculator = eagle(target, TreeConfig(budget=12, num_steps=4), num_slots=4)
    assert [s.emitted for s in decode(target, speculator, requests, 4)] == plain
    assert len({tuple(emitted) for emitted in plain}) == 4


@pytest.mark.parametrize(("prompt", "match"), [((), "empty"), ((1,) * 96, "context"), ((64,), "vocabulary")])
def test_prompts_that_cannot_be_decoded_are_refused(prompt, match) -> None:
    with pytest.raises(UserError, match=match):
        scheduler(tiny_target("llama"), Plain()).prepare(Request(prompt, SamplingParams()))


def test_the_context_ends_a_text() -> None:
    target = tiny_target("llama", 4)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    (s,) = decode(target, eagle(target, TreeConfig(budget=20)), [Request((1,) * 90, params)])
    assert s.finish_reason == "length"
    assert len(s.token_ids) == 96


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_drafting_stops_at_the_end_of_the_context_and_decoding_goes_on_to_it(family: str, monkeypatch) -> None:
    """One request ends there while another, which has room, is drafted for as ever."""
    target = tiny_target(family, 4, torch.float32)
    context, params = target.spec.context_len, SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Request((1, 2, 3) * (n // 3), params) for n in (context - 13, 9)]
    plain = [decode(target, Plain(), [r], max_len=context)[0] for r in requests]
    deepest: list[int] = []
    forward = target.forward

    def seen(rows, cache, last_only=False):
        deepest.append(int(rows.positions_RN.max()))
        return forward(rows, cache, last_only)

    monkeypatch.setattr(target, "forward", seen)
    tree = TreeConfig(budget=20)
    ours: list[Sequence] = []
    for speculator in (Ngram(tree), eagle(target, tree, num_slots=2, max_len=context)):
        ours = decode(target, speculator, requests, 2, context)
        assert [s.emitted for s in ours] == [s.emitted for s in plain]
        assert [(s.finish_reason, len(s.token_ids)) for s in ours] == [("length", context), ("length", 33)]
    assert ours[1].drafting.num_drafted == 20 * ours[1].drafting.num_cycles
    assert max(deepest) == context - 2  # the last token is emitted, and never read


def test_times_and_counts_add_up() -> None:
    target = tiny_target("llama", 3, vocab_size=12)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (s,) = decode(target, eagle(target, TreeConfig(budget=16, num_steps=4)), [Request((1, 2, 3), params)])
    assert s.origins[0] == "prefill"
    assert s.origins.count("refined") <= s.drafting.num_accepted_refined
    drafted = [o for o in s.origins if o in ("level0", "refined")]
    cut = (
        s.drafting.num_accepted + s.drafting.num_cycles - (len(s.origins) - 1)
    )  # tokens of the last path past the limit
    assert len(drafted) + s.origins.count("bonus") == len(s.origins) - 1
    assert 0 <= cut <= 4
