"""Texts take over the K/V of what others begin with: less is read, and neither a token nor, on the CPU, a bit depends
on it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from secondguess.config import TreeConfig
from secondguess.drafter.speculator import MOST_BEHIND, EagleSpeculator
from secondguess.engine import prefill
from secondguess.engine.cycle import Engine
from secondguess.engine.menu import Menu
from secondguess.engine.ngram import Ngram
from secondguess.engine.reuse import LEAST, num_common
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.sequence import Sequence
from secondguess.engine.speculate import Plain, Speculator
from secondguess.methods import packed_for_inference
from secondguess.target.hf import HFTarget
from secondguess.target.native import NativeDecoder
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import Request, SamplingParams, Speculation
from test_engine import ROOM, add, decode, eagle, random_params

MAX_LEN = 160
TREE = TreeConfig(budget=24, num_steps=3, grow_width=4, offer_width=6)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
STEM = tuple((7 * i * i + 3 * i) % 63 + 1 for i in range(40))


def text(start: int, count: int) -> tuple[int, ...]:
    """That no other begins like."""
    return tuple((start + 5 * i) % 63 + 1 for i in range(count))


def finish(s: Scheduler, request: Request) -> Sequence:
    sequence = add(s, request)
    while s.busy:
        s.step()
    return sequence


def alone(target: HFTarget, request: Request) -> Sequence:
    """By plain decoding, which nothing came before."""
    return decode(target, Plain(), [request], num_slots=1, max_len=MAX_LEN)[0]


def make(target: HFTarget, num_slots: int = 3, **settings) -> Scheduler:
    drafter = packed_for_inference(tiny_drafter(target))
    speculator = EagleSpeculator(drafter, TREE, num_slots, MAX_LEN + ROOM)
    return Scheduler(Engine(target, speculator, target.new_cache(num_slots, MAX_LEN + ROOM)), MAX_LEN, **settings)


@pytest.fixture
def llama() -> HFTarget:
    return tiny_target("llama", 1, torch.float32, hidden_size=64)


def counting(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the pieces that are read from now on."""
    forward, read = target.forward, []

    def counted(rows, cache, last_only=False):
        if last_only:
            read.append(rows.tokens_RN.shape[1])
        return forward(rows, cache, last_only)

    monkeypatch.setattr(target, "forward", counted)
    return read


@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.0), ("llama", 1.0), ("qwen2", 1.0), ("qwen3", 1.0), ("gemma3", 1.0)]
)
def test_a_second_turn_reads_what_is_new_and_gets_the_same_bits(family: str, temperature: float, monkeypatch) -> None:
    """K/V of accepted guesses are those of a plain pass: the answer is taken over like the prompt."""
    target = tiny_target(family, 3, torch.float32, vocab_size=12, hidden_size=64)
    assert isinstance(target._body.decoder, NativeDecoder) == (family != "gemma3")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True, logprobs=2)
    prompt = tuple(token % 12 for token in STEM)
    reusing, fresh = make(target), make(target)
    first = finish(reusing, Request(prompt, params))
    assert first.drafting.num_accepted > 4
    second = Request((*first.token_ids, *(token % 12 for token in text(3, 9))), params)
    read = counting(target, monkeypatch)
    ours, theirs = finish(reusing, second), finish(fresh, second)
    assert read == [len(second.prompt_ids) - ours.num_reused, len(second.prompt_ids)]
    assert ours.num_reused >= len(first.token_ids) - 1 - MOST_BEHIND, "the drafter may not have read the end"
    assert ours.emitted == theirs.emitted == alone(target, second).emitted
    assert ours.logprobs == theirs.logprobs
    assert ours.drafting == theirs.drafting
    assert torch.equal(*(columns(s, ours.num_cached) for s in (reusing, fresh)))


def test_a_prompt_in_pieces_leaves_the_drafter_the_same_bits(llama: HFTarget, monkeypatch) -> None:
    request = Request(text(1, 100), SamplingParams(max_tokens=30, ignore_eos=True))
    found = []
    for piece in (512, 24):
        monkeypatch.setattr(prefill, "PIECE", piece)
        s = make(llama)
        passes = lengths_of_passes(drafter_of(s), monkeypatch)
        sequence = finish(s, request)
        assert max(passes) == min(piece, 99)
        found.append((sequence.emitted, sequence.drafting, columns(s, 100)))
    (emitted, drafting, columns_N), (emitted_p, drafting_p, columns_p_N) = found
    assert emitted == emitted_p == alone(llama, request).emitted
    assert drafting == drafting_p
    assert torch.equal(columns_N, columns_p_N)


def drafter_of(s: Scheduler) -> EagleSpeculator:
    assert isinstance(s.engine.speculator, EagleSpeculator)
    return s.engine.speculator


def lengths_of_passes(speculator: EagleSpeculator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pairs that extend passes take from now on."""
    extend, lengths = speculator.extend, []

    def listed(pairs):
        lengths.append(pairs.tokens_RE.shape[1])
        return extend(pairs)

    monkeypatch.setattr(speculator, "extend", listed)
    return lengths


def columns(s: Scheduler, count: int) -> torch.Tensor:
    """The newest text's first K/V, of the target and as far as it has read of the drafter."""
    slot = s.free.texts[-1].slot
    drafter, spec = drafter_of(s), s.engine.target.spec
    known = drafter.keeps(slot, Speculation(), count)
    parts = [x[slot, :, :count] for i in range(spec.num_layers) for x in s.engine.cache.stores(i)]
    return torch.cat([x.flatten() for x in (*parts, *(x[slot, :, :known] for x in drafter.cache.stores(0)))])


def test_requests_that_run_share_what_they_begin_with(llama: HFTarget, monkeypatch) -> None:
    """Also where their settings differ. Pieces end where they would."""
    monkeypatch.setattr(prefill, "PIECE", 8)
    rng = random.Random(1)
    requests = [
        Request((*STEM, *text(i, 4 + i)), replace(random_params(rng, i % 2), max_tokens=20, ignore_eos=True), i)
        for i in range(4)
    ]
    expected = [alone(llama, request).emitted for request in requests]
    read, s = counting(llama, monkeypatch), make(llama)
    sequences = [add(s, request) for request in requests]
    while s.busy:
        s.step()
    assert [x.emitted for x in sequences] == expected
    assert [x.num_reused for x in sequences] == [0, 39, 39, 39]
    assert read == [8] * 5 + [4] + [1, 5] + [1, 6] + [1, 7]
    assert s.engine.totals.num_reused_tokens == 3 * 39


@pytest.mark.parametrize("common", [LEAST, LEAST + 1, 19, 24, 25])
def test_texts_that_part_within_a_piece(common: int, llama: HFTarget, monkeypatch) -> None:
    """The last token that they have in common is read again."""
    monkeypatch.setattr(prefill, "PIECE", 8)
    s, params = make(llama, 1), SHORT
    finish(s, Request(STEM, params))
    other = Request((*STEM[:common], STEM[common] + 1, *text(2, 9)), params)
    read = counting(llama, monkeypatch)
    sequence = finish(s, other)
    assert sequence.num_reused == (common - 1 if common > LEAST else 0)
    assert sum(read) == len(other.prompt_ids) - sequence.num_reused
    assert read[0] == 8 - sequence.num_reused % 8
    assert sequence.emitted == alone(llama, other).emitted


def test_answers_to_one_prompt_read_it_once_and_its_last_token_each(llama: HFTarget, monkeypatch) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    requests = [Request(STEM, params, choice) for choice in range(3)]
    expected = [alone(llama, request).emitted for request in requests]
    read = counting(llama, monkeypatch)
    found = decode(llama, eagle(llama, TREE, max_len=MAX_LEN), requests, max_len=MAX_LEN)
    assert [s.emitted for s in found] == expected
    assert read == [40, 1, 1]


def test_a_prompt_that_is_scored_is_read_from_its_beginning(llama: HFTarget) -> None:
    s, scored = make(llama), replace(SHORT, prompt_logprobs=1)
    finish(s, Request(STEM, SHORT))
    sequence = finish(s, Request(STEM, scored))
    assert sequence.num_reused == 0
    assert sequence.prompt_logprobs == alone(llama, Request(STEM, scored)).prompt_logprobs


def test_texts_make_way_in_the_order_of_their_last_use(llama: HFTarget) -> None:
    s = make(llama, 3)
    a, b, c, d = (finish(s, Request(text(i, 30), SHORT)) for i in (1, 15, 30, 45))
    assert [(x.slot, x.token_ids[0]) for x in s.free.texts] == [(2, 16), (1, 31), (0, 46)], "the lowest slot is taken"
    again = finish(s, Request((*b.token_ids, 1, 2), SHORT))
    assert again.num_reused >= len(b.token_ids) - 1 - MOST_BEHIND
    assert [(x.slot, x.token_ids[0]) for x in s.free.texts] == [(1, 46), (0, 16)], "what it has within is held once"
    fresh = make(llama)
    unaided = finish(fresh, again.request)
    assert (again.emitted, again.drafting) == (unaided.emitted, unaided.drafting)
    assert torch.equal(columns(s, again.num_cached), columns(fresh, again.num_cached)), "as copied"
    for gone in (a, c):
        assert s.free.find([*gone.token_ids, 3], Speculation(), []) is None
    last = finish(s, Request((*d.token_ids, 3), SHORT))
    assert last.num_reused >= len(d.token_ids) - 1 - MOST_BEHIND
    assert last.emitted == alone(llama, last.request).emitted
    assert sorted(s.free) == [0, 1, 2]


def test_texts_that_have_ended_give_room_to_those_that_run(llama: HFTarget) -> None:
    s = make(llama, 3, room=90)
    first = finish(s, Request(text(1, 30), SHORT))
    finish(s, Request(text(20, 30), SHORT))
    assert len(s.free.texts) == 2
    sequence = add(s, Request((*first.token_ids, 5), SHORT))
    s.step()
    assert sequence.num_reused
    assert [x.token_ids[0] for x in s.free.texts] == [21], "43 tokens beside its 42, until there are more"
    while not sequence.finish_reason:
        s.step()
    assert [x.token_ids for x in s.free.texts] == [sequence.token_ids]
    assert sequence.emitted == alone(llama, sequence.request).emitted


def test_nothing_is_kept_or_shared_where_that_is_not_wanted(llama: HFTarget, monkeypatch) -> None:
    s = make(llama, reuse=False)
    read = counting(llama, monkeypatch)
    for _ in range(2):
        add(s, Request(STEM, SHORT))
    while s.busy:
        s.step()
    finish(s, Request(STEM, SHORT))
    assert read == [40, 40, 40]
    assert not s.free.texts


@pytest.mark.parametrize("seed", range(12))
def test_no_token_depends_on_reuse(seed: int, monkeypatch) -> None:
    """Conversations over a few stems, by all methods, in few slots and little room, some of them given up."""
    rng = random.Random(seed)
    monkeypatch.setattr(prefill, "PIECE", rng.choice([8, 512]))
    target = tiny_target(rng.choice(["llama", "qwen2", "qwen3", "gemma3"]), seed, torch.float32, vocab_size=40)
    pr = eagle(target, TREE, seed, max_len=MAX_LEN)
    speculator: Speculator = Menu({"pr": pr, "ar": Plain(), "ngram": Ngram(TREE)}, "pr")
    engine = Engine(target, speculator, target.new_cache(3, MAX_LEN + ROOM))
    s = Scheduler(engine, MAX_LEN, room=rng.choice([None, 170, 250]))
    stems, done = [rng.choices(range(40), k=24) for _ in range(2)], list[Sequence]()
    for _ in range(14):
        stem = rng.choice([*stems, *(x.token_ids for x in done)])
        stem = stem[: rng.choice([len(stem), rng.randrange(len(stem))])]
        prompt = (*stem, *rng.choices(range(40), k=rng.randrange(1, 12)))[:100]
        wish = Speculation(rng.choice([None, None, None, "ar", "ngram"]))
        sequence = add(s, Request(prompt, random_params(rng, rng.choice([0.0, 1.0])), speculation=wish))
        for _ in range(rng.randrange(12)):
            s.step()
        if rng.random() < 0.1:
            s.abort(sequence)
        done.append(sequence)
    while s.busy:
        s.step()
    assert any(x.num_reused for x in done)
    for sequence in done:
        if sequence.finish_reason != "abort":
            assert sequence.emitted == alone(target, sequence.request).emitted
    assert sorted(s.free) == [0, 1, 2]


def test_common_tokens() -> None:
    assert num_common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert num_common([1, 2], [1, 2, 3]) == 2
    assert num_common([], [1]) == 0
