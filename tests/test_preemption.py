"""K/V without room for every slot: the newest request goes back to the queue, and no text depends on it."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from secondguess import LLM, SamplingParams, TreeConfig, UserError, machine
from secondguess.cli import main
from secondguess.engine import pages as pages_module
from secondguess.engine import room
from secondguess.engine import scheduler as scheduler_module
from secondguess.engine.cycle import Engine
from secondguess.engine.ngram import Ngram
from secondguess.engine.pages import LENT, PAGE, Pages
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.sequence import Sequence
from secondguess.engine.slots import SlotCache
from secondguess.engine.speculate import Plain, Speculator
from secondguess.engine.thread import run
from secondguess.testing import tiny_target
from secondguess.types import Delta, Drafting, Request, Speculation
from test_engine import MAX_LEN, ROOM, add, decode, eagle, random_requests
from test_server_engine import Alternating

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
LONG = SamplingParams(temperature=1.0, seed=7, max_tokens=120, ignore_eos=True)
ROOM_TOKENS = 256  # three join, and do not stay together


# The scheduler


@pytest.mark.parametrize("seed", range(24))
def test_no_token_depends_on_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    rng = random.Random(seed)
    target = tiny_target(rng.choice(["llama", "qwen2", "qwen3", "gemma3"]), seed, torch.float32, vocab_size=40)
    endless = {"max_tokens": 24, "ignore_eos": True, "stop_token_ids": ()}
    requests = [
        replace(request, params=replace(request.params, **endless))
        for request in random_requests(rng, 40, rng.choice([0.0, 1.0]), 6)
    ]
    speculator: Speculator = rng.choice([Plain(), Ngram(TREE), eagle(target, TREE, seed)])
    engine = Engine(target, speculator, target.new_cache(3, MAX_LEN + ROOM))
    s = Scheduler(engine, MAX_LEN, room=rng.randrange(40, 48))  # two prompts have room for sure, two answers never
    sequences = [add(s, request) for request in requests]
    while s.busy:
        s.step()
        running = s.batch.sequences if s.batch else []
        held = [len(x.token_ids) for x in (*running, *s.free.texts)]
        assert len(held) <= 1 or sum(held) <= (s.room or 0)
    assert engine.totals.num_preemptions > 0
    for sequence, alone in zip(sequences, decode(target, Plain(), requests), strict=True):
        assert sequence.token_ids == alone.token_ids
        assert sequence.finish_reason == alone.finish_reason
        assert len(sequence.origins) == len(alone.origins)
    assert not s.resting
    assert sorted(s.free) == [0, 1, 2]
    assert engine.totals.num_prompt_tokens == sum(len(request.prompt_ids) for request in requests)


def test_the_newest_goes_and_comes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    target = tiny_target("llama", vocab_size=40)
    s = Scheduler(Engine(target, Plain(), target.new_cache(2, MAX_LEN + ROOM)), MAX_LEN, room=30)
    first, second, third = (add(s, Request((1, 2, 3), replace(LONG, max_tokens=20))) for _ in range(3))
    while not s.resting:
        s.step()
    assert [*s.resting] == [second]
    assert [*s.waiting] == [second, third]
    assert not second.finish_reason
    while first.finish_reason is None:
        s.step()
        assert second in s.waiting
    while s.busy:
        s.step()
    assert first.finish_reason == second.finish_reason == third.finish_reason == "length"
    assert second.timing.queue > first.timing.queue


def test_one_that_rests_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "HEADROOM", 0)
    target = tiny_target("llama", vocab_size=40)
    s = Scheduler(Engine(target, Plain(), target.new_cache(2, MAX_LEN + ROOM)), MAX_LEN, room=20)
    sequences = [add(s, Request((1, 2, 3), replace(LONG, max_tokens=20))) for _ in range(2)]
    while not s.resting:
        s.step()
    s.abort(sequences[1])
    assert not s.resting
    assert not s.waiting
    while s.busy:
        s.step()
    assert (sequences[0].finish_reason, sequences[1].finish_reason) == ("length", "abort")
    assert sorted(s.free) == [0, 1]


# The LLM and the server


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder / "target", method="ar", max_model_len=ROOM_TOKENS)


@pytest.fixture
def llm(folder: Path) -> LLM:
    sizes = {"max_batch_size": 4, "max_model_len": ROOM_TOKENS, "kv_cache_tokens": ROOM_TOKENS}
    return LLM(folder / "target", folder / "drafters" / "pr", others=("ar", "ngram", "eagle3.1"), tree=TREE, **sizes)


async def read(llm: LLM, request: Request) -> list[Delta]:
    async with aclosing(llm.answer(request)) as deltas:
        return [delta async for delta in deltas]


def test_streams_of_all_kinds_keep_their_text(llm: LLM, plain: LLM) -> None:
    wishes = (None, "ar", "ngram", "eagle3.1", None, "pr")
    requests = [Request((5, 6, 7), LONG, choice, speculation=Speculation(w)) for choice, w in enumerate(wishes)]
    requests.append(Request((4, 5), replace(LONG, logprobs=0, ignore_eos=False), grammar=Alternating(100)))

    async def crowd() -> list[list[Delta]]:
        return await asyncio.gather(*(read(llm, request) for request in requests))

    answers = asyncio.run(crowd())
    assert llm.totals.num_preemptions > 0
    for request, deltas in zip(requests, answers, strict=True):
        (alone,) = asyncio.run(read(plain, replace(request, speculation=Speculation())))[-1:]
        output = deltas[-1].output
        assert output is not None
        assert alone.output is not None
        assert output.token_ids == alone.output.token_ids
        assert output.logprobs == alone.output.logprobs
        assert "".join(delta.text for delta in deltas) == output.text == alone.output.text
        assert sum(len(delta.token_ids) for delta in deltas) == len(output.token_ids)
    assert llm.load.num_running == llm.load.num_waiting == 0


def test_a_client_that_leaves_while_it_rests(llm: LLM) -> None:
    async def leave() -> None:
        *stayers, leaver = [asyncio.create_task(read(llm, Request((5, 6), LONG, choice))) for choice in range(3)]
        async with asyncio.timeout(60):
            while not llm._scheduler.resting:
                await asyncio.sleep(0.001)
        leaver.cancel()
        await asyncio.gather(*stayers)
        assert leaver.cancelled()

    asyncio.run(leave())
    run(int)
    assert not llm._scheduler.resting
    assert llm.load.num_running == llm.load.num_waiting == 0


def test_a_server_tells_of_it(llm: LLM, plain: LLM) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    httpx = pytest.importorskip("httpx")
    from secondguess.server.app import make_app
    from secondguess.server.report import report
    from secondguess.server.service import Service
    from secondguess.server.settings import Settings

    app, before = make_app(Service(llm, "tiny", Settings())), llm.totals
    body = {"prompt": "hello", "max_tokens": 120, "seed": 7, "ignore_eos": True}

    async def crowd():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(5)))
            return replies, (await client.get("/metrics")).text, (await client.get("/server_info")).json()

    replies, metrics, info = asyncio.run(crowd())
    text = plain.generate("hello", LONG)[0].text
    assert [reply.json()["choices"][0]["text"] for reply in replies] == [text] * 5
    count = llm.totals.num_preemptions - before.num_preemptions
    assert count > 0
    assert f'num_preemptions_total{{model_name="tiny"}} {llm.totals.num_preemptions}.0' in metrics
    assert f"Preempted: {count} reqs" in report(llm, before, llm.totals, 10)[0]
    assert info["kv_cache_tokens"] == ROOM_TOKENS


def test_a_servers_totals_are_the_sum_of_all_that_ran(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that were sent back, and of one whose client left."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    httpx = pytest.importorskip("httpx")
    from secondguess.server.app import make_app
    from secondguess.server.service import Service
    from secondguess.server.settings import Settings

    sequences, prepare = list[Sequence](), llm._scheduler.prepare
    service = Service(llm, "tiny", Settings())
    app = make_app(service)

    def recorded(request: Request) -> Sequence:
        sequences.append(prepare(request))
        return sequences[-1]

    body = {"prompt": "hello", "max_tokens": 120, "seed": 7, "ignore_eos": True}

    async def crowd() -> str:
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            monkeypatch.setattr(llm._scheduler, "prepare", recorded)
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)]
            async with asyncio.timeout(60):
                while not llm._scheduler.resting:
                    await asyncio.sleep(0.001)
            tasks[0].cancel()
            await asyncio.wait(tasks)
            run(int)
            return (await client.get("/metrics")).text

    page, totals, drafting = asyncio.run(crowd()), service.metrics.totals, Drafting()
    for s in sequences:
        drafting.cycles += s.drafting.cycles
        drafting.num_drafted_refined += s.drafting.num_drafted_refined
        drafting.num_accepted_refined += s.drafting.num_accepted_refined
        drafting.num_steps += s.drafting.num_steps
    assert len(sequences) == 5
    assert totals.num_preemptions > 0
    assert totals.num_tokens == sum(len(s.origins) for s in sequences)
    assert totals.num_prompt_tokens == sum(len(s.request.prompt_ids) for s in sequences if s.origins)
    assert totals.drafting == drafting
    assert f'generation_tokens_total{{model_name="tiny"}} {totals.num_tokens}.0' in page
    for reason, count in (("length", 4), ("abort", 1)):
        assert f'request_success_total{{finished_reason="{reason}",model_name="tiny"}} {count}.0' in page
    assert 'e2e_request_latency_seconds_count{model_name="tiny"} 4.0' in page


def test_room_for_less_than_one_request_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"at least max_model_len \(64\), got 63"):
        LLM(folder / "target", method="ar", max_model_len=64, kv_cache_tokens=63)
    flags = ["--port", "0", "--method", "ar", "--max-model-len", "64", "--kv-cache-tokens", "8"]
    assert main(["serve", str(folder / "target"), *flags]) == 2
    assert "kv_cache_tokens must be a whole number" in capsys.readouterr().err


def test_slots_are_what_the_budget_holds_where_memory_is_taken_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(tokens: int | None) -> LLM:
        return LLM(folder / "target", method="ar", max_batch_size=4, max_model_len=64, kv_cache_tokens=tokens)

    assert make(150).engine.cache.num_slots == (4 if LENT else 2)
    monkeypatch.setattr(pages_module, "LENT", False)
    assert make(None).engine.cache.num_slots == make(256).engine.cache.num_slots == 4
    assert not caplog.records
    llm = make(150)
    assert llm.engine.cache.num_slots == llm.max_batch_size == 2
    assert "150 tokens of K/V cache are room for 2 of max_model_len (64) tokens" in caplog.text


def test_memory_is_the_limit_where_slots_hold_more(
    folder: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(share: float) -> LLM:
        """With that share of the memory that all slots take, and some more that others need."""
        monkeypatch.setattr(room, "available_bytes", lambda: int(share * size / room.SHARE))
        return LLM(folder / "target", method="ar", max_batch_size=4, max_model_len=ROOM_TOKENS)

    size = LLM(folder / "target", method="ar", max_batch_size=4, max_model_len=ROOM_TOKENS).engine.cache.bytes
    assert make(1.01).kv_cache_tokens is None
    assert not caplog.records
    llm = make(0.3)
    assert llm.kv_cache_tokens == pytest.approx(0.3 * 4 * llm.engine.cache.num_columns, rel=0.02)
    assert "then the newest waits" in caplog.text
    outputs = llm.generate(["hello"] * 4, LONG)
    assert llm.totals.num_preemptions > 0
    assert {output.text for output in outputs} == {plain.generate("hello", LONG)[0].text}
    with pytest.raises(UserError, match=r"no room for one of max_model_len \(256\) tokens"):
        make(0.1)


# Memory


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(not LENT, reason="this system lends no memory by the page")
def test_memory_is_taken_as_it_fills_and_given_back() -> None:
    size = 64 * 2**20
    before = resident()
    pages = Pages((4, size // 4), torch.uint8)
    assert resident() - before < size / 8
    pages.tensor.fill_(1)
    assert resident() - before > size * 7 / 8
    pages.give_back(pages.tensor[2])
    assert resident() - before < size * 7 / 8
    assert [int(part.max()) for part in pages.tensor] == [1, 1, 0, 1]


@pytest.mark.skipif(not LENT, reason="this system lends no memory by the page")
def test_what_shares_a_page_stays() -> None:
    pages = Pages((3, 2 * PAGE + 100), torch.uint8)
    pages.tensor.fill_(1)
    pages.give_back(pages.tensor[1])
    assert bool((pages.tensor[[0, 2]] == 1).all())
    assert int((pages.tensor[1] == 0).sum()) == PAGE


def test_a_slot_is_released_and_no_other() -> None:
    cache = SlotCache(3, 2048, ((2, 4), (1, 6)), torch.float32)
    for layer in range(2):
        for store in cache.stores(layer):
            store.fill_(1.0)
    cache.release(1)
    for layer in range(2):
        for store in cache.stores(layer):
            assert bool((store[[0, 2]] == 1).all())
            assert bool((store[1] == 0).any()) == LENT


@pytest.mark.parametrize(
    ("group", "free"),
    [({}, 8000 * 1024), ({"memory.max": "max\n"}, 8000 * 1024), ({"memory.max": "5000000\n"}, 2500000)],
)
def test_free_memory_is_the_machines_and_the_groups(
    group: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"} | group
    if group:
        files |= {"memory.current": "3000000\n", "memory.stat": "file 9\ninactive_file 500000\nactive_file 7\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "Path", lambda name: tmp_path / "meminfo" if name.startswith("/proc") else tmp_path)
    assert machine.available_bytes() == free
