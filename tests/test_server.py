"""The server's API: what it answers, what it refuses, and that speculation changes no text."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

import httpx
from fastapi import FastAPI

from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.server.app import make_app
from secondguess.server.report import report
from secondguess.server.scores import by_text, token_bytes
from secondguess.server.service import Service
from secondguess.server.settings import Settings
from secondguess.server.shape import Shape
from secondguess.types import Output, Request, Speculation, TokenLogprobs, Totals

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "seed": 7, "ignore_eos": True}
TEXT = {"prompt": "hello", "max_tokens": 24, "seed": 7, "ignore_eos": True}
NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
LETTERS = {"logit_bias": {"69": 100.0, "70": 99.0}}  # two letters in a random order
WAYS = (None, True, False, {"method": "ngram"}, {"method": "eagle3.1", "budget": 5}, {"budget": 2})


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    others = ("ar", "ngram", "eagle3.1")
    room = {"max_batch_size": 4, "max_model_len": 256}
    return LLM(folder / "target", folder / "drafters" / "pr", others=others, tree=TREE, **room)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder / "target", method="ar", max_model_len=256)


@pytest.fixture
def app(llm: LLM) -> FastAPI:
    return make_app(Service(llm, "tiny", Settings()))


def app_with(llm: LLM, **settings: Any) -> FastAPI:
    return make_app(Service(llm, "tiny", Settings(**settings)))


def send(app: FastAPI, method: str, path: str, **more: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **more)

    return asyncio.run(go())


def get(app: FastAPI, path: str, **more: Any) -> httpx.Response:
    return send(app, "GET", path, **more)


def post(app: FastAPI, path: str, body: Mapping[str, Any], **more: Any) -> httpx.Response:
    return send(app, "POST", path, json=body, **more)


def chat(app: FastAPI, **changes: Any) -> dict[str, Any]:
    response = post(app, "/v1/chat/completions", CHAT | changes)
    assert response.status_code == 200, response.text
    return response.json()


def complete(app: FastAPI, **changes: Any) -> dict[str, Any]:
    response = post(app, "/v1/completions", TEXT | changes)
    assert response.status_code == 200, response.text
    return response.json()


def events(app: FastAPI, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a streamed answer."""
    response = post(app, path, dict(body) | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def expected(plain: LLM, text: str = "hello", **changes: Any) -> str:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True} | changes
    return plain.generate(text, SamplingParams(**params))[0].text


# Answers


@pytest.mark.parametrize("speculation", WAYS)
def test_a_chat_is_plain_decodings_text(app: FastAPI, plain: LLM, speculation: Any) -> None:
    answer = chat(app, speculation=speculation)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    message = {"role": "assistant", "content": expected(plain, "hello\n"), "refusal": None}  # the template ends a line
    assert choice["message"] == message
    assert answer["usage"] == {**NOTHING_CACHED, "prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}
    assert answer["metrics"]["seed"] == 7


def test_metrics_of_a_request_have_vllms_shape(app: FastAPI) -> None:
    found = chat(app, speculation={"method": "pr"})["metrics"]["speculative_decoding"]
    histogram, steps = found["acceptance_histogram"], found["num_spec_steps"]
    assert len(histogram) == TREE.max_budget + 1
    assert sum(histogram) == steps
    accepted = sum(i * count for i, count in enumerate(histogram))
    assert accepted == found["num_accepted_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + accepted / steps
    assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    assert found["num_spec_tokens"] == TREE.budget
    by_length = found["acceptance_histogram_by_draft_length"]
    assert all(len(row) == int(length) + 1 for length, row in by_length.items())
    assert sum(int(length) * sum(row) for length, row in by_length.items()) == found["num_draft_tokens"]
    for name in ("num_draft_tokens", "num_accepted_draft_tokens"):
        assert sum(level[name] for level in found["by_level"].values()) == found[name]
    assert found["by_level"]["1"]["num_draft_tokens"] > 0


def test_metrics_follow_what_the_request_asked_for(app: FastAPI) -> None:
    off = chat(app, speculation=False)["metrics"]["speculative_decoding"]
    assert (off["num_spec_steps"], off["num_spec_tokens"], off["acceptance_histogram"]) == (0, 0, [0])
    assert off["mean_acceptance_length"] == 1
    few = chat(app, speculation={"method": "eagle3.1", "budget": 2})["metrics"]["speculative_decoding"]
    assert few["num_spec_tokens"] == 2
    assert few["num_draft_tokens"] == 2 * few["num_spec_steps"] > 0
    assert few["by_level"]["1"]["num_draft_tokens"] == 0
    assert chat(app, n=2)["metrics"]["speculative_decoding"] is None


@pytest.mark.parametrize("speculation", [None, False])
def test_a_streamed_chat(app: FastAPI, plain: LLM, speculation: Any) -> None:
    parts = events(app, "/v1/chat/completions", CHAT | {"speculation": speculation})
    assert len({part["id"] for part in parts}) == 1
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert all("usage" not in part for part in parts)
    first, *middle, last = [part["choices"][0] for part in parts]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert all(piece["finish_reason"] is None for piece in (first, *middle))
    assert "".join(piece["delta"]["content"] for piece in middle) == expected(plain, "hello\n")


def test_usage_comes_last_if_it_is_wanted(app: FastAPI) -> None:
    *parts, last = events(app, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    whole = chat(app)
    assert last["usage"] == whole["usage"]
    assert last["metrics"]["speculative_decoding"].keys() == whole["metrics"]["speculative_decoding"].keys()


def test_usage_so_far(app: FastAPI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = events(app, "/v1/completions", TEXT | {"stream_options": options})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert 1 <= counts[0] < 24
    assert counts[-1] == last["usage"]["completion_tokens"] == 24


def test_several_choices(app: FastAPI, llm: LLM) -> None:
    answer = chat(app, n=3)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == chat(app)["choices"][0]["message"]["content"]
    assert answer["usage"] == {**NOTHING_CACHED, "prompt_tokens": 6, "completion_tokens": 72, "total_tokens": 78}
    pieces = events(app, "/v1/chat/completions", CHAT | {"n": 3})
    for i, text in enumerate(texts):
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == i]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(p["delta"].get("content", "") for p in mine) == text
        assert mine[-1]["finish_reason"] == "length"


def test_a_drawn_seed_repeats_the_answer(app: FastAPI) -> None:
    one = chat(app, seed=None)
    again = chat(app, seed=one["metrics"]["seed"])
    assert again["choices"] == one["choices"]


def test_messages_in_parts_and_in_other_roles(app: FastAPI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    text = chat(app, messages=[{"role": "user", "content": parts}])["choices"]
    assert text == chat(app, messages=[{"role": "user", "content": "hel\nlo"}])["choices"]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert chat(app, messages=history, tools=[{"type": "function", "function": {"name": "f"}}])["choices"]


def test_tools_and_variables_reach_the_template(app: FastAPI, llm: LLM, plain: LLM, monkeypatch) -> None:
    template = "{{ tools | length }} {{ tools[0].function.name }} {{ mood }} {{ messages[0].content }}"
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    more = {"tools": [tool], "chat_template_kwargs": {"mood": "fine"}}
    answer = chat(app, **more)["choices"][0]["message"]["content"]
    assert answer == expected(plain, "1 f fine hello")
    found = post(app, "/tokenize", {"messages": CHAT["messages"], **more}).json()
    assert found["tokens"] == list(llm.encode("1 f fine hello"))


@pytest.mark.parametrize("speculation", WAYS)
def test_a_completion_is_plain_decodings_text(app: FastAPI, plain: LLM, speculation: Any) -> None:
    answer = complete(app, speculation=speculation)
    assert answer["object"] == "text_completion"
    text = expected(plain)
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    parts = events(app, "/v1/completions", TEXT | {"speculation": speculation})
    assert "".join(part["choices"][0]["text"] for part in parts) == text


def test_prompts_in_every_form(app: FastAPI, llm: LLM, plain: LLM) -> None:
    ids = [list(llm.encode(text)) for text in ("hello", "other one")]
    texts = [expected(plain), expected(plain, "other one")]
    for prompt in (["hello", "other one"], ids):
        answer = complete(app, prompt=prompt, n=2)
        assert [choice["text"] for choice in answer["choices"]][::2] == texts
        assert answer["usage"]["prompt_tokens"] == 14
        assert answer["usage"]["completion_tokens"] == 96
    for prompt in ("hello", ids[0]):
        assert [choice["text"] for choice in complete(app, prompt=prompt)["choices"]] == texts[:1]


@pytest.mark.parametrize("seed", [7, None])
def test_a_prompt_that_is_given_twice_gets_other_answers(app: FastAPI, seed: int | None) -> None:
    answer = complete(app, prompt=["hello", "other", "hello"], n=2, seed=seed)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 6
    assert answer["usage"]["prompt_tokens"] == 15
    again = complete(app, n=4, seed=answer["metrics"]["seed"])
    assert [choice["text"] for choice in again["choices"]] == [*texts[:2], *texts[4:]]


def test_echo(app: FastAPI, llm: LLM, plain: LLM) -> None:
    text = expected(plain)
    assert complete(app, echo=True)["choices"][0]["text"] == "hello" + text
    assert complete(app, prompt=list(llm.encode("hello")), echo=True)["choices"][0]["text"] == "hello" + text
    parts = events(app, "/v1/completions", TEXT | {"echo": True})
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello" + text


def test_stops_and_limits(app: FastAPI, plain: LLM) -> None:
    whole = complete(app, **LETTERS)["choices"][0]["text"]
    assert len(set(whole)) == 2
    stop = whole[5:8]
    for given in (stop, [stop, "zzz"]):
        cut = complete(app, **LETTERS, stop=given)["choices"][0]
        assert cut == {"index": 0, "text": whole[: whole.find(stop)], "logprobs": None, "finish_reason": "stop"}
    assert complete(app, stop_token_ids=[69, 70], **LETTERS)["usage"]["completion_tokens"] == 1
    assert complete(app, stop_token_ids=[69, 70], min_tokens=9, **LETTERS)["usage"]["completion_tokens"] >= 9
    assert complete(app, max_tokens=None)["usage"]["completion_tokens"] == 16
    without_limit = CHAT | {"max_tokens": None, "max_completion_tokens": None}
    answer = post(app, "/v1/chat/completions", without_limit).json()
    assert answer["usage"]["total_tokens"] == 256
    assert chat(app, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_sampling_settings_reach_the_sampler(app: FastAPI, plain: LLM) -> None:
    settings = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 12,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    }
    text = complete(app, logit_bias={"5": -1.0, "77": 2}, **settings)["choices"][0]["text"]
    assert text == expected(plain, logit_bias={5: -1.0, 77: 2.0}, **settings)
    assert complete(app, temperature=0)["choices"][0]["text"] == expected(plain, temperature=0.0)
    assert complete(app, top_k=-1)["choices"][0]["text"] == expected(plain)


def test_logprobs_of_a_chat(app: FastAPI, plain: LLM) -> None:
    content = chat(app, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=3)
    (output,) = plain.generate("hello\n", params)
    assert [entry["logprob"] for entry in content] == [t.logprob for t in output.logprobs]
    assert [entry["token"] for entry in content] == [plain.decode([token]) for token in output.token_ids]
    assert all(bytes(entry["bytes"]).decode(errors="replace") == entry["token"] for entry in content)
    assert [len(entry["bytes"]) for entry in content] == [1] * 24, "parts of characters have theirs, too"
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == output.text
    for entry, t in zip(content, output.logprobs, strict=True):
        assert [best["logprob"] for best in entry["top_logprobs"]] == [logp for _, logp in t.top]
    parts = events(app, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3})
    pieces = [part["choices"][0]["logprobs"] for part in parts]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content
    assert chat(app, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_of_a_completion(app: FastAPI, plain: LLM) -> None:
    found = complete(app, logprobs=2)["choices"][0]["logprobs"]
    tokens, offsets = found["tokens"], found["text_offset"]
    assert len(tokens) == len(found["token_logprobs"]) == 24
    assert offsets == sorted(offsets)
    for token, logprob, best in zip(tokens, found["token_logprobs"], found["top_logprobs"], strict=True):
        assert best[token] == logprob
        assert 1 <= len(best) <= 3
    parts = events(app, "/v1/completions", TEXT | {"logprobs": 2})
    pieces = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for piece in pieces for entry in piece[name]] == found[name]


def test_offsets_are_those_of_the_text(app: FastAPI) -> None:
    """Where a character is of several tokens, all of them begin where it does."""
    body = {"prompt": "h\u00e9llo \U0001f600!", "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = complete(app, **body)["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7, 8]
    assert choice["text"][:8] == body["prompt"]


def test_tokens_that_read_alike_are_all_reported(llm: LLM) -> None:
    half, other = llm.encode("\u00e9")
    found = by_text(llm, TokenLogprobs(half, -2.0, ((other, -0.5), (70, -1.0))))
    assert found == {f"token_id:{other}": -0.5, llm.decode([70]): -1.0, "\ufffd": -2.0}
    assert by_text(llm, TokenLogprobs(half, -0.5, ((half, -0.5),))) == {"\ufffd": -0.5}
    assert token_bytes(llm, half) + token_bytes(llm, other) == "\u00e9".encode()
    assert token_bytes(llm, 0) == b"<end>"


@pytest.mark.parametrize("speculation", [None, False])
def test_of_a_stop_string_nothing_is_told(app: FastAPI, speculation: Any) -> None:
    """Neither its text nor the log-probabilities of its tokens, also where they come one by one."""
    body = TEXT | LETTERS | {"speculation": speculation}
    whole = complete(app, **body, logprobs=1)["choices"][0]
    stop = whole["text"][5:9]
    end = whole["text"].find(stop)
    cut = complete(app, **body, logprobs=1, stop=["zzz", stop])["choices"][0]
    assert cut["text"] == whole["text"][:end]
    for name, values in cut["logprobs"].items():
        assert values == whole["logprobs"][name][:end]
    parts = [part["choices"][0] for part in events(app, "/v1/completions", body | {"logprobs": 1, "stop": stop})]
    for part in parts:
        assert len(part["text"]) == len((part["logprobs"] or {"tokens": []})["tokens"])
    assert "".join(part["text"] for part in parts) == cut["text"]
    of_chat = chat(app, **LETTERS, speculation=speculation)["choices"][0]["message"]["content"]
    scored = chat(app, **LETTERS, speculation=speculation, logprobs=True, stop=of_chat[5:9])["choices"][0]
    said = "".join(entry["token"] for entry in scored["logprobs"]["content"])
    assert said == scored["message"]["content"] == of_chat[: of_chat.find(of_chat[5:9])]


def test_an_end_token_is_told(app: FastAPI) -> None:
    for stop in (None, "zzz"):
        choice = complete(app, **LETTERS, stop_token_ids=[69, 70], stop=stop, logprobs=0)["choices"][0]
        assert (choice["text"], len(choice["logprobs"]["tokens"])) == ("", 1)


def test_a_text_can_be_scored(app: FastAPI, llm: LLM, plain: LLM) -> None:
    """As lm-eval does it: the prompt comes back with the log-probabilities of its tokens."""
    ids = list(llm.encode("hello there"))
    found = complete(app, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"][0]["logprobs"]
    params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
    (output,) = plain.generate([ids], params)
    scores = [t.logprob for t in (*output.prompt_logprobs, *output.logprobs)]
    assert found["token_logprobs"] == [None, *scores]
    assert found["top_logprobs"][0] is None
    assert len(found["tokens"]) == len(found["text_offset"]) == len(ids) + 1
    assert "".join(found["tokens"][:-1]) == "hello there"
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(ids) + 1)]


# Refusals

CALL = {"role": "assistant", "content": None}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"temprature": 1.0}, "temprature", "did you mean temperature"),
        ({"best_of": 2}, "best_of", "unknown or unsupported"),
        ({"maxTokens": 2}, "maxTokens", "unknown or unsupported"),
        ({"n2": 2}, "n2", "unknown or unsupported"),
        ({"list": 2}, "list", "unknown or unsupported"),
        ({"speculation": {"str": 2}}, "speculation.str", "unknown or unsupported"),
        ({"model": 3}, "model", "valid string"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 10**6}, "max_tokens", "room for 256"),
        ({"min_tokens": 30}, "min_tokens", "between 0 and max_tokens"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"x" * 1000: 1}, "x" * 100, "unknown or unsupported"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"stop": [3]}, "stop.0", "valid string"),
        ({"stop": [""]}, "stop", "must not be empty"),
        ({"stop": ["a"] * 17}, "stop", "give 16 at most"),
        ({"stop": "a" * 513}, "stop", "512 characters at most"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "vocabulary ends at 256"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "vocabulary ends at 256"),
        ({"logit_bias": {"no": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include", "did you mean include_usage"),
        ({"speculation": {"method": "prr"}}, "speculation", "did you mean pr"),
        ({"speculation": {"budget": 13}}, "speculation", "budget must be in"),
        ({"speculation": {"budget": 0}}, "speculation.budget", "greater than or equal to 1"),
        ({"speculation": {"width": 3}}, "speculation.width", "unknown or unsupported"),
        ({"speculation": 3}, "speculation", "valid"),
    ],
)
def test_what_is_wrong_is_named(app: FastAPI, changes: dict[str, Any], param: str, said: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert_refused(post(app, path, body | changes), 400, param, said)


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "contnt": "x"}]}, "messages.0.contnt", "did you mean content"),
        ({"messages": [{"role": "user"}]}, "messages", "needs 'content'"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "301 tokens"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"max_completion_tokens": 3}, "max_tokens", "differ"),
        ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "no variable"),
        ({"max_tokens": None, "max_completion_tokens": 300}, "max_completion_tokens", "room for 256"),
        ({"n": 128, "max_tokens": 10**6}, "max_tokens", "room for 256"),
        ({"echo": True}, "echo", "unknown or unsupported"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'text'"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema",
            "goes with the type json_schema",
        ),
        ({"messages": [CALL | {"tool_calls": [call("[" * 100_000)]}]}, "messages", "nested too deep"),
        ({"messages": [CALL | {"tool_calls": [call("{")]}]}, "messages", "no JSON"),
        ({"messages": [CALL | {"tool_calls": [{"a": nested(500)}]}]}, "messages", "recursion"),
    ],
)
def test_what_is_wrong_with_a_chat(app: FastAPI, changes: dict[str, Any], param: str, said: str) -> None:
    assert_refused(post(app, "/v1/chat/completions", CHAT | changes), 400, param, said)


def test_half_a_character_is_refused(app: FastAPI) -> None:
    headers = {"content-type": "application/json"}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        text = json.dumps(body).replace("hello", "\\ud800")
        assert send(app, "POST", path, content=text, headers=headers).status_code == 400
        text = json.dumps(body).replace("seed", "\\ud800")
        assert_refused(send(app, "POST", path, content=text, headers=headers), 400, "\\ud800", "unknown")


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": 3}, "prompt", "valid string"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        ({"prompt": ["a", 1]}, "prompt.1", "valid string"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1", "valid integer"),
        ({"prompt": [999]}, "prompt", "outside the target's vocabulary"),
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"prompt": ["a"] * 300}, "prompt", "room for"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs", "do not stream"),
        ({"messages": CHAT["messages"]}, "messages", "unknown or unsupported"),
    ],
)
def test_what_is_wrong_with_a_completion(app: FastAPI, changes: dict[str, Any], param: str, said: str) -> None:
    assert_refused(post(app, "/v1/completions", TEXT | changes), 400, param, said)


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/v1/completions", {"prompt": [0.5] * 500_000}, "prompt.0"),
        ("/v1/completions", {"stop": [3] * 500_000}, "stop.0"),
        ("/v1/completions", {"logit_bias": {str(i): "x" for i in range(200_000)}}, "logit_bias"),
        ("/v1/completions", {"x" * 3_000_000: 1}, "x" * 100),
        ("/v1/chat/completions", {"messages": [{"role": "x"}] * 100_000}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [3] * 500_000}]}, "messages.0.content.0"),
        ("/v1/chat/completions", {"tools": [3] * 500_000}, "tools.0"),
    ],
)
def test_a_body_of_faults_holds_nobody_up(app: FastAPI, path: str, wrong: dict[str, Any], param: str) -> None:
    """It stops at the first one. The times are this thread's own."""
    content = json.dumps((CHAT if "chat" in path else TEXT) | wrong)
    started = time.thread_time()
    response = send(app, "POST", path, content=content, headers={"content-type": "application/json"})
    assert time.thread_time() - started < 0.7
    assert_refused(response, 400, param, "")


@pytest.mark.parametrize(("template", "param"), [("tools", "tools"), ("mood", "chat_template_kwargs")])
def test_what_a_template_does_not_take_is_named(app: FastAPI, llm: LLM, monkeypatch, template: str, param: str) -> None:
    refusing = f"{{% if {template} %}}{{{{ raise_exception('no') }}}}{{% endif %}}x"
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", refusing)
    tool = {"type": "function", "function": {"name": "f"}}
    body = CHAT | {"tools": [tool], "chat_template_kwargs": {"mood": "fine"}}
    assert_refused(post(app, "/v1/chat/completions", body), 400, param, "does not take this conversation")


def test_nulls_stand_for_what_is_not_given(app: FastAPI) -> None:
    nulls = dict.fromkeys(("best_of", "suffix", "audio", "top_p", "stop", "logit_bias"))
    assert complete(app, **nulls)["choices"] == complete(app)["choices"]
    user = {"role": "user", "content": "hello", "annotations": None, "refusal": None}
    assert chat(app, messages=[user])["choices"] == chat(app)["choices"]


def test_any_whole_number_of_64_bits_is_a_seed(app: FastAPI) -> None:
    one = complete(app, seed=-1)
    assert one["metrics"]["seed"] == 2**63 - 1
    assert complete(app, seed=2**63 - 1)["choices"] == one["choices"] != complete(app, seed=1)["choices"]


def test_without_a_limit_a_completion_fits_into_the_room_that_there_is(app: FastAPI) -> None:
    assert complete(app, prompt="x" * 250, max_tokens=None)["usage"]["completion_tokens"] == 6


def test_more_prompts_than_there_is_room_for_are_not_even_read(app: FastAPI, llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm, "encode", lambda _: pytest.fail("it was tokenized"))
    assert_refused(post(app, "/v1/completions", TEXT | {"prompt": ["a"] * 200, "n": 2}), 400, "n", "room for")


def test_texts_that_can_never_fit_are_not_tokenized(app: FastAPI, llm: LLM, monkeypatch) -> None:
    """No token of the tiny vocabulary has more than five characters."""
    assert llm.max_characters == 5 * 256
    monkeypatch.setattr(llm, "encode", lambda _: pytest.fail("it was tokenized"))
    said, long = "1281 characters", "x" * 1281
    assert_refused(post(app, "/v1/completions", TEXT | {"prompt": long}), 400, "prompt", said)
    messages = [{"role": "user", "content": long[:1000]}, {"role": "user", "content": long[1000:]}]
    assert_refused(post(app, "/v1/chat/completions", CHAT | {"messages": messages}), 400, "messages", said)
    assert_refused(post(app, "/tokenize", {"prompt": long}), 400, "prompt", said)


def assert_refused(response: httpx.Response, status: int, param: str | None, said: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert said in error["message"], error


def test_bodies_that_are_no_json(app: FastAPI) -> None:
    for content in (b"{", b"", b"[]", b"\xff", b"[" * 5000):
        headers = {"content-type": "application/json"}
        response = send(app, "POST", "/v1/completions", content=content, headers=headers)
        assert_refused(response, 400, None, "")


def test_other_models_and_paths(app: FastAPI) -> None:
    assert_refused(post(app, "/v1/completions", TEXT | {"model": "gpt"}), 404, "model", "this server has 'tiny'")
    assert complete(app, model="tiny")["model"] == "tiny"
    assert_refused(get(app, "/v1/nothing"), 404, None, "Not Found")
    assert_refused(get(app, "/v1/completions"), 405, None, "Not Allowed")


def test_large_bodies(llm: LLM) -> None:
    app = app_with(llm, max_body_bytes=2000)
    assert_refused(post(app, "/v1/completions", TEXT | {"user": "x" * 2000}), 413, None, "more than 2000 bytes")
    assert complete(app, user="x" * 1000)


def test_a_key_lets_in(llm: LLM) -> None:
    app = app_with(llm, api_key="secret")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer "}):
        response = post(app, "/v1/completions", TEXT, headers=headers)
        assert_refused(response, 401, None, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert post(app, "/v1/completions", TEXT, headers={"authorization": "Bearer secret"}).status_code == 200
    assert get(app, "/metrics").status_code == 401
    assert get(app, "/health").status_code == 200


def test_white_space_around_a_key_counts_on_neither_side(llm: LLM) -> None:
    app = app_with(llm, api_key=" secret\n")
    assert get(app, "/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


def test_how_long_a_key_takes_tells_nothing_of_it(llm: LLM, monkeypatch) -> None:
    seen, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *keys: seen.append(keys) or compare(*keys))
    app = app_with(llm, api_key="secret")
    for key, status in (("secre", 401), ("secret", 200)):
        assert get(app, "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status
    assert seen == [(b"secre", b"secret"), (b"secret", b"secret")]


def test_other_sites_may_call_only_if_they_are_let_in(llm: LLM) -> None:
    origin = {"origin": "http://page.example"}
    ask = origin | {"access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in get(app_with(llm), "/health", headers=origin).headers
    app = app_with(llm, allow_origin=("http://page.example",), api_key="secret")
    assert get(app, "/health", headers=origin).headers["access-control-allow-origin"] == "http://page.example"
    preflight = send(app, "OPTIONS", "/v1/completions", headers=ask)
    assert preflight.status_code == 200


# Information


def test_health_and_models(app: FastAPI) -> None:
    assert get(app, "/health").status_code == get(app, "/health_generate").status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", get(app, "/version").json()["version"])
    (card,) = get(app, "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert get(app, "/v1/models/tiny").json() == card
    assert_refused(get(app, "/v1/models/a/b"), 404, "model", "no model 'a/b'")


def test_server_info(app: FastAPI) -> None:
    info = get(app, "/server_info").json()
    assert info["method"] == "pr"
    assert set(info["methods"]) == {"pr", "ar", "ngram", "eagle3.1"}
    assert info["methods"]["pr"]["budget"] == TREE.budget
    assert info["switched_off"] == {}
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1


def test_tokens_there_and_back(app: FastAPI, llm: LLM) -> None:
    text = "h\u00e9llo"
    found = post(app, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == list(llm.encode(text))
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 6
    assert found["max_model_len"] == 256
    assert post(app, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    of_chat = post(app, "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()
    assert of_chat["tokens"] == list(llm.encode("a\n"))
    assert of_chat["token_strs"] is None
    assert_refused(post(app, "/tokenize", {}), 400, "prompt", "either prompt or messages")
    assert_refused(post(app, "/detokenize", {"tokens": [257]}), 400, "tokens", "outside the vocabulary")
    assert_refused(post(app, "/detokenize", {"tokens": [5] * 257}), 400, "tokens", "257 tokens")
    for name, value in (("tools", [{}]), ("chat_template_kwargs", {"mood": "fine"})):
        assert_refused(post(app, "/tokenize", {"prompt": "a", name: value}), 400, name, "goes with messages")


def test_nothing_is_tokenized_in_the_event_loop(app: FastAPI, llm: LLM, monkeypatch) -> None:
    names, decode = [], llm.decode
    monkeypatch.setattr(llm, "decode", lambda ids: names.append(threading.current_thread().name) or decode(ids))
    assert post(app, "/detokenize", {"tokens": [70, 71]}).status_code == 200
    assert post(app, "/tokenize", {"prompt": "ab", "return_token_strs": True}).status_code == 200
    assert len(names) == 3
    with monkeypatch.context() as patch:
        patch.setattr(Shape, "whole", lambda *_: {"in": threading.current_thread().name})
        names.append(complete(app, logprobs=2)["in"])
    assert all(name.startswith("secondguess-reader") for name in names)


def test_the_schema_can_be_read(app: FastAPI) -> None:
    schema = get(app, "/openapi.json").json()
    assert get(app, "/docs").status_code == get(app, "/redoc").status_code == 404, "they would load foreign scripts"
    body = schema["components"]["schemas"]["ChatBody"]
    assert body["additionalProperties"] is False
    assert set(schema["paths"]["/v1/completions"]["post"]["responses"]) == {"200", "4XX", "5XX"}


# Numbers


def scraped(app: FastAPI) -> dict[str, float]:
    """Counters by name and level or position, summed over other labels."""
    found: dict[str, float] = defaultdict(float)
    for line in get(app, "/metrics").text.splitlines():
        if match := re.fullmatch(r"secondguess:(\w+)\{(.*)\} (\S+)", line):
            name, labels, value = match.groups()
            extra = re.findall(r'(?:level|position|finished_reason)="(\w+)"', labels)
            found[" ".join([name, *extra])] += float(value)
    return found


def test_a_second_turn_takes_over_what_the_first_has_read(folder, plain: LLM) -> None:
    llm = LLM(folder / "target", folder / "drafters" / "pr", others=("ar",), tree=TREE, max_model_len=256)
    app, turns, usages = app_with(llm), [{"role": "user", "content": "a question of forty letters, or nearly"}], []
    for _ in range(2):
        body = CHAT | {"messages": turns, "max_tokens": 40, "temperature": 0}
        answer = send(app, "POST", "/v1/chat/completions", json=body).json()
        text = answer["choices"][0]["message"]["content"]
        params = SamplingParams(max_tokens=40, seed=7, ignore_eos=True)
        assert text == plain.generate([turns], [params])[0].text
        turns = [*turns, {"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        usages.append(answer["usage"])
    page, (first, second) = get(app, "/metrics").text, usages
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["prompt_tokens"] - 1, "the template's end may differ, and the answer be other tokens"
    assert f'prefix_cache_hits_total{{model_name="tiny"}} {cached}.0' in page
    rate = cached / llm.totals.num_prompt_tokens
    assert f"Prefix cache hit rate: {rate:.1%}" in report(llm, Totals(), llm.totals, 10)[0]


def test_totals_are_the_sum_of_the_requests(app: FastAPI) -> None:
    before = scraped(app)
    bodies = [CHAT | {"seed": i, "speculation": way, "max_tokens": 9 + i} for i, way in enumerate(WAYS)]

    async def crowd() -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
            return [reply.json() for reply in replies]

    answers, after = asyncio.run(crowd()), scraped(app)
    grown = {name: value - before[name] for name, value in after.items()}
    ours = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert grown["spec_decode_num_drafts_total"] == sum(m["num_spec_steps"] for m in ours)
    for level in ("0", "1"):
        for theirs, mine in (("draft", "num_draft_tokens"), ("accepted", "num_accepted_draft_tokens")):
            total = sum(m["by_level"][level][mine] for m in ours)
            assert grown[f"spec_decode_num_{theirs}_tokens_total {level}"] == total
    deepest = max(i for m in ours for i, count in enumerate(m["acceptance_histogram"]) if count)
    assert len([name for name in after if "per_pos" in name]) == TREE.num_steps > deepest > 0, "all there are, from 0"
    for position in range(deepest):
        total = sum(sum(m["acceptance_histogram"][position + 1 :]) for m in ours)
        assert grown[f"spec_decode_num_accepted_tokens_per_pos_total {position}"] == total
    assert grown["generation_tokens_total"] == sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert grown["prompt_tokens_total"] == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert grown["prefix_cache_queries_total"] == grown["prompt_tokens_total"]
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert grown["prefix_cache_hits_total"] == cached
    assert grown["request_success_total length"] == len(bodies)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert grown[f"{name}_seconds_count"] == len(bodies)
    tokens_after_the_first = grown["generation_tokens_total"] - len(bodies)
    assert grown["inter_token_latency_seconds_count"] == tokens_after_the_first
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0


def test_a_switched_off_drafter_shows(folder) -> None:
    llm = LLM(folder / "target", folder / "drafters" / "pr", others=("ar",), tree=TREE, max_model_len=64)
    app = make_app(Service(llm, "tiny", Settings()))
    assert 'spec_decode_switched_off{method="pr",model_name="tiny"} 0.0' in get(app, "/metrics").text
    llm.engine.speculator.speculators["pr"].draft = lambda _: 1 / 0  # type: ignore[attr-defined]
    assert complete(app)["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert get(app, "/server_info").json()["switched_off"] == {"pr": "ZeroDivisionError: division by zero"}
    assert 'spec_decode_switched_off{method="pr",model_name="tiny"} 1.0' in get(app, "/metrics").text


def test_the_line_in_the_log(llm: LLM, plain: LLM) -> None:
    from secondguess.server.report import report

    before = llm.totals
    assert report(llm, before, llm.totals, 10) == []
    output = asyncio.run(read(llm, "pr", (1, 2, 3)))
    engine, drafting = report(llm, before, llm.totals, 10)
    assert "prompt throughput: 0.3 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 0 reqs" in engine
    assert f"Mean acceptance length: {output.drafting.acceptance_length:.2f}" in drafting
    assert f"Drafted: {output.drafting.num_drafted} tokens" in drafting
    before = llm.totals
    asyncio.run(read(llm, "ar", (1, 2)))
    assert len(report(llm, before, llm.totals, 10)) == 1


def test_a_server_under_load_writes_it(llm: LLM, monkeypatch, caplog) -> None:
    from secondguess.server import app as application
    from secondguess.server.report import report_forever

    monkeypatch.setattr(application, "report_forever", partial(report_forever, interval_s=0.05))
    app = app_with(llm)

    async def serve() -> None:
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            asyncio.timeout(60),
        ):
            while "Mean acceptance length" not in caplog.text:
                await client.post("/v1/completions", json=TEXT | {"speculation": {"method": "pr"}})
            await asyncio.sleep(0.2)
            caplog.clear()
            await asyncio.sleep(0.2)
            assert not caplog.text  # nothing to tell

    with caplog.at_level(logging.INFO, logger="secondguess.server.report"):
        asyncio.run(serve())


async def read(llm: LLM, method: str, prompt: tuple[int, ...]) -> Output:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = [delta.output async for delta in llm.answer(Request(prompt, params, speculation=Speculation(method)))]
    assert outputs[-1] is not None
    return outputs[-1]
