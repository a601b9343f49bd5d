"""The server under stress: full queues, clients that leave, faults, signals; and a client that we did not write."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import Message

from ports import free_port
from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.cli import main
from secondguess.engine.thread import run, submit
from secondguess.server import information, replies
from secondguess.server import service as service_module
from secondguess.server.app import make_app
from secondguess.server.listen import Server, url_of
from secondguess.server.service import Service
from secondguess.server.settings import Settings
from secondguess.server.shape import CompletionShape

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
TEXT = {"prompt": "hello", "max_tokens": 24, "seed": 7, "ignore_eos": True}
ENDLESS = TEXT | {"max_tokens": 900}


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    others = ("ar", "ngram", "eagle3.1")
    return LLM(folder / "target", folder / "drafters" / "pr", others=others, tree=TREE, max_batch_size=2)


@pytest.fixture(scope="module")
def text(folder) -> str:
    """Of ``TEXT``, decoded plainly."""
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
    return LLM(folder / "target", method="ar").generate("hello", params)[0].text


def service_of(llm: LLM, **settings: Any) -> tuple[Service, FastAPI]:
    service = Service(llm, "tiny", Settings(**settings))
    return service, make_app(service)


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def assert_idle(llm: LLM, service: Service) -> None:
    run(int)
    assert service.num_inside == 0
    assert llm.load.num_running == llm.load.num_waiting == 0
    assert sorted(llm._scheduler.free) == [0, 1]


@contextmanager
def engine_held() -> Iterator[threading.Event]:
    """Meanwhile the engine does nothing."""
    gate = threading.Event()
    submit(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


# Queue and time


def test_a_full_queue_says_come_again(llm: LLM, text: str) -> None:
    service, app = service_of(llm, max_queue=1)

    async def crowd() -> list[httpx.Response]:
        async with client_of(app) as client:
            with engine_held():
                tasks = [asyncio.create_task(client.post("/v1/completions", json=TEXT)) for _ in range(5)]
                await until(lambda: sum(task.done() for task in tasks) == 2)
                health = await client.get("/health")
                assert health.status_code == 200
            return await asyncio.gather(*tasks)

    responses = asyncio.run(crowd())
    assert sorted(r.status_code for r in responses) == [200, 200, 200, 429, 429]
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
        else:
            assert response.json()["choices"][0]["text"] == text
    assert_idle(llm, service)
    assert 'request_rejected_total{model_name="tiny"} 2.0' in service.metrics.page().decode()


def test_all_answers_of_a_request_find_room_or_none(llm: LLM) -> None:
    service, app = service_of(llm, max_queue=2)

    async def ask() -> tuple[int, int]:
        async with client_of(app) as client:
            with engine_held():
                first = asyncio.create_task(client.post("/v1/completions", json=TEXT | {"n": 3}))
                await until(lambda: service.num_inside == 3)
                second = await client.post("/v1/completions", json=TEXT | {"n": 2})
            return (await first).status_code, second.status_code

    assert asyncio.run(ask()) == (200, 429)
    assert_idle(llm, service)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(llm: LLM, stream: bool) -> None:
    service, app = service_of(llm, request_timeout=0.4)

    async def ask() -> httpx.Response:
        async with client_of(app) as client:
            with engine_held():
                return await client.post("/v1/completions", json=ENDLESS | {"stream": stream})

    response = asyncio.run(ask())
    if stream:
        error = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["error"]
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert (error["code"], error["type"]) == ("timeout", "server_error")
    assert_idle(llm, service)


def test_a_request_that_takes_too_long_to_read(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm, request_timeout=0.05)
    monkeypatch.setattr(llm, "encode", lambda _: time.sleep(0.3))

    async def ask() -> httpx.Response:
        async with client_of(app) as client:
            return await client.post("/v1/completions", json=TEXT)

    response = asyncio.run(ask())
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert_idle(llm, service)


def test_reading_and_answering_have_one_deadline(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm, request_timeout=0.8)
    encode = llm.encode
    monkeypatch.setattr(llm, "encode", lambda prompt: time.sleep(0.6) or encode(prompt))

    async def ask() -> tuple[httpx.Response, float]:
        async with client_of(app) as client:
            with engine_held():
                started = time.monotonic()
                return await client.post("/v1/completions", json=TEXT), time.monotonic() - started

    response, seconds = asyncio.run(ask())
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert seconds < 1.3
    assert_idle(llm, service)


@pytest.mark.parametrize("part", [b"", b"{"])
def test_a_body_that_does_not_come(llm: LLM, part: bytes) -> None:
    service, app = service_of(llm, request_timeout=0.2)
    parts, sent = [part], []

    async def receive() -> Message:
        if not parts:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": parts.pop(), "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(dict(SCOPE), receive, send), 20))
    assert sent[0]["status"] == 408
    assert "longer than 0.2 s" in json.loads(sent[1]["body"])["error"]["message"]
    assert_idle(llm, service)


def test_texts_to_tokenize_wait_in_a_bounded_queue(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm, max_queue=1)
    encode, gate = llm.encode, threading.Event()
    monkeypatch.setattr(llm, "encode", lambda prompt: gate.wait(20) and encode(prompt))

    async def crowd() -> list[httpx.Response]:
        async with client_of(app) as client:
            tasks = [asyncio.create_task(client.post("/tokenize", json={"prompt": "hello"})) for _ in range(5)]
            await until(lambda: sum(task.done() for task in tasks) == 2)
            gate.set()
            return await asyncio.gather(*tasks)

    assert sorted(r.status_code for r in asyncio.run(crowd())) == [200, 200, 200, 429, 429]
    assert service.num_texts == 0


def test_one_probe_is_for_all_who_ask(llm: LLM, monkeypatch) -> None:
    _, app = service_of(llm)
    started, start = [], llm.start
    monkeypatch.setattr(llm, "start", lambda *given: started.append(given) or start(*given))

    async def ask() -> list[int]:
        async with client_of(app) as client:
            with engine_held():
                tasks = [asyncio.create_task(client.get("/health_generate")) for _ in range(4)]
                await until(lambda: len(started) == 1)
                await asyncio.sleep(0.05)
                tasks[0].cancel()
            return [(await task).status_code for task in tasks[1:]]

    assert asyncio.run(ask()) == [200] * 3
    assert len(started) == 1


def test_latencies_begin_when_a_request_arrives(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm)
    encode = llm.encode
    monkeypatch.setattr(llm, "encode", lambda prompt: time.sleep(0.4) or encode(prompt))

    async def ask() -> None:
        async with client_of(app) as client:
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 200

    asyncio.run(ask())
    for name in ("time_to_first_token", "e2e_request_latency"):
        seconds = re.findall(rf"{name}_seconds_sum\S+ (\S+)", service.metrics.page().decode())
        assert float(seconds[0]) >= 0.4


def test_addresses_as_a_browser_takes_them() -> None:
    assert url_of("::1", 8000) == "http://[::1]:8000"
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"


def test_requests_that_are_still_read_have_a_place(llm: LLM, text: str, monkeypatch) -> None:
    service, app = service_of(llm, max_queue=1)
    encode, gate = llm.encode, threading.Event()
    monkeypatch.setattr(llm, "encode", lambda prompt: gate.wait(20) and encode(prompt))

    async def crowd() -> list[httpx.Response]:
        async with client_of(app) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=TEXT)) for _ in range(5)]
            await until(lambda: sum(task.done() for task in tasks) == 2)
            gate.set()
            return await asyncio.gather(*tasks)

    responses = asyncio.run(crowd())
    assert sorted(r.status_code for r in responses) == [200, 200, 200, 429, 429]
    assert {r.json()["choices"][0]["text"] for r in responses if r.status_code == 200} == {text}
    assert_idle(llm, service)


def test_a_full_queue_is_no_reason_to_be_unhealthy(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm, max_queue=0)
    totals = []

    async def ask() -> None:
        async with client_of(app) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=ENDLESS)) for _ in range(2)]
            await until(lambda: llm.load.num_running == 2)
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 429
            assert (await client.get("/health_generate")).status_code == 200
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            run(int)
            totals.append(llm.totals)
            assert (await client.get("/health_generate")).status_code == 200, "also if nothing runs"
            totals.append(llm.totals)
            monkeypatch.setattr(service_module, "PROBE_S", 0.05)
            with engine_held():
                response = await client.get("/health_generate")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stuck")

    asyncio.run(ask())
    assert totals[0] == totals[1], "it is in no counter"
    assert_idle(llm, service)


def test_an_engine_that_fails_is_not_healthy(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm)

    async def ask() -> httpx.Response:
        async with client_of(app) as client:
            return await client.get("/health_generate")

    with monkeypatch.context() as patch:
        patch.setattr(llm.target, "forward", lambda *_, **__: 1 / 0)
        assert asyncio.run(ask()).status_code == 500
    assert asyncio.run(ask()).status_code == 200
    assert_idle(llm, service)


def test_an_engine_that_does_not_move_is_not_healthy(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm)
    monkeypatch.setattr(information, "SILENCE_S", 0.3)

    async def ask() -> list[int]:
        async with client_of(app) as client:
            statuses = [(await client.get("/health")).status_code]
            with engine_held():
                task = asyncio.create_task(client.post("/v1/completions", json=TEXT))
                await until(lambda: service.silent_s > 0.3)
                statuses.append((await client.get("/health")).status_code)
            await task
            return [*statuses, (await client.get("/health")).status_code]

    assert asyncio.run(ask()) == [200, 503, 200]
    assert_idle(llm, service)


# Clients that leave


async def call(app: FastAPI, body: dict[str, Any], leave: asyncio.Event, heard: list[bytes]) -> None:
    """POST as a client that leaves at ``leave``; ``heard`` gets the bodies."""
    content, sent = json.dumps(body).encode(), False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            heard.append(message["body"])

    await app(dict(SCOPE), receive, send)


SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_frees_its_slots(llm: LLM, stream: bool, n: int) -> None:
    service, app = service_of(llm)

    async def leave() -> None:
        leaving, heard = asyncio.Event(), []
        task = asyncio.create_task(call(app, ENDLESS | {"stream": stream, "n": n}, leaving, heard))
        await until(lambda: llm.load.num_running == min(n, 2))
        leaving.set()
        await asyncio.wait_for(task, 20)
        run(int)  # the cycle that was going on
        assert llm.load.num_running == llm.load.num_waiting == 0

    asyncio.run(leave())
    assert_idle(llm, service)
    assert f'finished_reason="abort",model_name="tiny"}} {n}.0' in service.metrics.page().decode()


def test_a_client_that_leaves_the_queue(llm: LLM, text: str) -> None:
    service, app = service_of(llm)

    async def leave() -> str:
        async with client_of(app) as client:
            with engine_held():
                leaving = asyncio.Event()
                task = asyncio.create_task(call(app, ENDLESS, leaving, []))
                await until(lambda: service.num_inside == 1)
                other = asyncio.create_task(client.post("/v1/completions", json=TEXT))
                await until(lambda: service.num_inside == 2)
                leaving.set()
                await asyncio.wait_for(task, 20)
                assert service.num_inside == 1
            return (await other).json()["choices"][0]["text"]

    assert asyncio.run(leave()) == text
    assert_idle(llm, service)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_holds_no_slot_and_a_place_until_the_deadline(
    llm: LLM, stream: bool, monkeypatch
) -> None:
    service, app = service_of(llm, request_timeout=1.5)
    monkeypatch.setattr(replies, "LAST_WORDS_S", 0.05)
    bodies = [json.dumps(TEXT | {"stream": stream}).encode()]

    async def send(_: Message) -> None:
        await asyncio.sleep(3600)

    async def receive() -> Message:
        if not bodies:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": bodies.pop()}

    async def stall() -> None:
        task = asyncio.create_task(app(dict(SCOPE), receive, send))
        await until(lambda: any(clock.ended for job in service.jobs for clock in job.clocks))
        run(int)
        assert llm.load.num_running == 0
        assert service.num_inside == 1
        await asyncio.wait_for(task, 20)

    asyncio.run(stall())
    assert_idle(llm, service)


# Faults


def test_a_fault_of_the_engine_is_a_500_and_the_next_request_is_well(llm: LLM, text: str, monkeypatch) -> None:
    """The counts tell it from clients that left."""
    service, app = service_of(llm)
    forward = llm.target.forward

    def failing(rows, cache, last_only=False):
        if not last_only:
            raise MemoryError("secret detail")
        return forward(rows, cache, last_only)

    async def ask() -> httpx.Response:
        async with client_of(app) as client:
            return await client.post("/v1/completions", json=TEXT)

    with monkeypatch.context() as patch:
        patch.setattr(llm.target, "forward", failing)
        response = asyncio.run(ask())
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret detail" not in response.text
    assert asyncio.run(ask()).json()["choices"][0]["text"] == text
    counts = dict(
        re.findall(r'request_success_total\{finished_reason="(\w+)",\S+ (\S+)', service.metrics.page().decode())
    )
    assert counts == {"error": "1.0", "length": "1.0"}
    assert_idle(llm, service)


def test_a_fault_in_writing_a_stream_is_told(llm: LLM, monkeypatch) -> None:
    service, app = service_of(llm)
    monkeypatch.setattr(CompletionShape, "pieces", lambda *_: 1 / 0)

    async def ask() -> str:
        async with client_of(app) as client:
            return (await client.post("/v1/completions", json=TEXT | {"stream": True})).text

    event, done, _ = asyncio.run(ask()).split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert done == "data: [DONE]"
    assert_idle(llm, service)


def test_refused_requests_do_not_disturb_their_batch_mates(llm: LLM, text: str) -> None:
    service, app = service_of(llm)
    bad = [{"prompt": [999]}, {"prompt": "x" * 2000}, {"logit_bias": {"999": 1}}, {"speculation": {"method": "x"}}]

    async def crowd() -> list[httpx.Response]:
        async with client_of(app) as client:
            bodies = [TEXT, *(TEXT | b for b in bad), TEXT]
            return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))

    first, *refused, last = asyncio.run(crowd())
    assert [r.status_code for r in refused] == [400] * 4
    for response in (first, last):
        assert response.json()["choices"][0]["text"] == text
    assert_idle(llm, service)


def test_the_engine_is_warm_before_the_server_is_ready(llm: LLM) -> None:
    _, app = service_of(llm)
    before = llm.totals.num_tokens

    async def start() -> int:
        async with app.router.lifespan_context(app):
            return llm.totals.num_tokens - before

    assert asyncio.run(start()) > 1


def test_everything_is_warm_and_nothing_of_it_counts(llm: LLM, monkeypatch) -> None:
    _, app = service_of(llm)
    warmed, answer = [], llm.answer
    monkeypatch.setattr(llm, "answer", lambda request: warmed.append(request.speculation.method) or answer(request))

    async def start() -> str:
        async with app.router.lifespan_context(app), client_of(app) as client:
            assert (await client.get("/health_generate")).status_code == 200
            return (await client.get("/metrics")).text

    counts = re.findall(r"^secondguess:\w+_(?:total|count)\{.*\} (\S+)$", asyncio.run(start()), re.MULTILINE)
    assert len(counts) > 5
    assert set(counts) == {"0.0"}
    assert set(warmed) == {"pr", "ar", "ngram", "eagle3.1"}
    if find_spec("xgrammar"):
        assert "grammars" in vars(llm)


# Real connections


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    with running(app) as (_, url):
        yield url


@contextmanager
def running(app: FastAPI) -> Iterator[tuple[Server, str]]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_config=None), "tiny")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield server, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_connection_frees_its_slot(llm: LLM, stream: bool) -> None:
    service, app = service_of(llm)
    with listening(app) as url:
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=0.2)
        deadline = time.monotonic() + 20
        while service.num_inside or llm.load.num_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert 'finished_reason="abort"' in service.metrics.page().decode()
    assert_idle(llm, service)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_the_server_drains_frees_its_slot(llm: LLM, stream: bool, monkeypatch) -> None:
    service, app = service_of(llm)
    step = llm._pump.step
    monkeypatch.setattr(llm._pump, "step", lambda: (time.sleep(0.05), step()))
    with running(app) as (server, url):
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}) as response:
                lines = response.iter_lines()  # which end the connection when they are forgotten
                next(lines)
                server.handle_exit(signal.SIGTERM, None)
                time.sleep(0.5)
                assert service.num_inside == 1, "it is not told to leave"
        else:
            threading.Timer(0.4, server.handle_exit, (signal.SIGTERM, None)).start()
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=1)
        deadline = time.monotonic() + 15
        while service.num_inside:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert_idle(llm, service)


def test_the_official_client(llm: LLM, text: str) -> None:
    openai = pytest.importorskip("openai")
    service, app = service_of(llm, api_key="secret")
    with listening(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        extra = {"ignore_eos": True, "speculation": {"method": "pr"}}
        whole = client.completions.create(model="tiny", prompt="hello", max_tokens=24, seed=7, extra_body=extra)
        assert whole.choices[0].text == text
        assert whole.usage.completion_tokens == 24
        messages = [{"role": "user", "content": "hello"}]
        same = {"model": "tiny", "messages": messages, "max_tokens": 24, "seed": 7}
        answers = [
            client.chat.completions.create(**same, extra_body={"ignore_eos": True, "speculation": way})
            for way in (True, False)
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        scored = client.chat.completions.create(**same, n=2, logprobs=True, top_logprobs=2, stop="zzz")
        assert len(scored.choices) == 2
        assert len(scored.choices[0].logprobs.content[0].top_logprobs) == 2
        stream = client.chat.completions.create(
            **same, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        parts = list(stream)
        said = [part.choices[0].delta.content or "" for part in parts if part.choices]
        assert "".join(said) == answers[0].choices[0].message.content
        assert parts[-1].usage.completion_tokens == 24
        assert parts[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
        with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
            client.chat.completions.create(**same, extra_body={"temprature": 1})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**same | {"model": "gpt"})
    assert_idle(llm, service)


def test_the_official_client_gets_what_it_asks_for(llm: LLM, text: str) -> None:
    openai = pytest.importorskip("openai")
    service, app = service_of(llm)
    with listening(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        same = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "extra_body": {"ignore_eos": True}}
        stop = text[9:12]
        cut = client.completions.create(**same, seed=7, stop=[stop]).choices[0]
        assert (cut.text, cut.finish_reason) == (text[: text.find(stop)], "stop")
        once, again = (client.completions.create(**same, seed=7).choices[0].text for _ in range(2))
        assert once == again == text != client.completions.create(**same, seed=8).choices[0].text
        parts = list(client.completions.create(**same, seed=7, stream=True))
        assert "".join(part.choices[0].text for part in parts) == text
        assert parts[-1].choices[0].finish_reason == "length"
    assert_idle(llm, service)


def test_tools_of_the_official_client_reach_the_template(llm: LLM, monkeypatch) -> None:
    openai = pytest.importorskip("openai")
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %} {{ messages[0].content }}"
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", template)
    service, app = service_of(llm)
    with listening(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        same = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        counts = [client.chat.completions.create(**same, **t).usage.prompt_tokens for t in ({}, {"tools": [tool]})]
    assert counts[1] - counts[0] == len("weather")
    assert_idle(llm, service)


# The command


@contextmanager
def served(folder, port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    if port == 0:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
    command = [sys.executable, "-m", "secondguess", "serve", str(folder / "target"), "--port", str(port)]
    drafter = ["--drafter", str(folder / "drafters" / "pr"), "--budget", "12", "--max-model-len", "1024"]
    process = subprocess.Popen([*command, *drafter], env=os.environ | {"SECONDGUESS_API_KEY": "secret"})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while not answers_at(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.wait()


def answers_at(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_lets_running_requests_end(folder) -> None:
    headers = {"authorization": "Bearer secret"}
    with served(folder) as (process, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        body = ENDLESS | {"stream": True, "max_tokens": 300, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 300
        assert process.wait(30) == 0


def test_it_says_that_it_serves_once_it_does(folder) -> None:
    port = free_port()
    command = [sys.executable, "-m", "secondguess", "serve", str(folder / "target"), "--method", "ar"]
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            assert any(f"at http://127.0.0.1:{port}" in line for line in process.stderr)
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        finally:
            process.kill()


def test_a_killed_server_starts_again_where_it_was(folder, text: str) -> None:
    headers = {"authorization": "Bearer secret"}
    with served(folder) as (process, url):
        stream = {"json": ENDLESS | {"stream": True}, "headers": headers, "timeout": 60}
        with httpx.stream("POST", f"{url}/v1/completions", **stream) as response:
            lines = response.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
    with served(folder, int(url.rpartition(":")[2])) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json=TEXT, headers=headers, timeout=60)
        assert answer.json()["choices"][0]["text"] == text


def test_what_cannot_be_served_is_said_in_one_line(folder, capsys) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = str(sock.getsockname()[1])
        target = str(folder / "target")
        for flags, said in (
            (["--port", taken], "cannot listen at 127.0.0.1"),
            (["--port", "99999"], "--port must be in"),
            (["--host", "nowhere.invalid"], "cannot listen at nowhere.invalid"),
            (["--port", "0", "--method", "prr"], "did you mean pr"),
            (["--port", "0", "--request-timeout", "0"], "request_timeout must be above 0"),
            (["--port", "0", "--api-key", ""], "api_key must not be empty"),
            (["--port", "0"], "no drafter 'pr'"),
        ):
            assert main(["serve", target, *flags]) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
            assert said in line
