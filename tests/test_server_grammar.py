"""Answers that follow a grammar: with and without speculation, and what cannot be followed is refused."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("xgrammar")
pytest.importorskip("httpx")

import httpx
from fastapi import FastAPI

from secondguess import LLM, TreeConfig
from secondguess.server.app import make_app
from secondguess.server.service import Service
from secondguess.server.settings import Settings
from test_server_faults import listening
from tiny_folder import save_tiny

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
# A random model likes white space as much as anything else, and JSON has room for a lot of it.
NO_SPACE = {"logit_bias": {str(token): -100 for token in (198, 199, 202, 221)}}  # tab, new line, return, space


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    return LLM(folder / "target", folder / "drafters" / "pr", others=("ar", "ngram"), tree=TREE, max_model_len=256)


@pytest.fixture
def app(llm: LLM) -> FastAPI:
    return make_app(Service(llm, "tiny", Settings()))


def post(app: FastAPI, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """All at once."""

    async def go() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            paths = ["/v1/chat/completions" if "messages" in body else "/v1/completions" for body in bodies]
            return await asyncio.gather(*(client.post(p, json=b) for p, b in zip(paths, bodies, strict=True)))

    return asyncio.run(go())


def texts(app: FastAPI, body: dict[str, Any]) -> tuple[str, str]:
    """With speculation, without it and by prompt lookup, in one batch with a free request; why it ended."""
    ways = [True, False, {"method": "ngram"}]
    *replies, free = post(app, *(body | {"speculation": way} for way in ways), CHAT | {"max_tokens": 20})
    assert free.status_code == 200
    for reply in replies:
        assert reply.status_code == 200, reply.text
    choices = [reply.json()["choices"][0] for reply in replies]
    said = {choice["message"]["content"] for choice in choices}
    assert len(said) == 1
    return said.pop(), choices[0]["finish_reason"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", ["[a-f]{3,9}", "(yes|no), (really|perhaps)", "[0-9]{4}-[0-9]{2}"])
def test_regular_expressions(app: FastAPI, pattern: str, temperature: float) -> None:
    text, reason = texts(app, CHAT | {"structured_outputs": {"regex": pattern}, "temperature": temperature})
    assert reason == "stop"
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("seed", range(3))
def test_json_schemas(app: FastAPI, seed: int) -> None:
    formats = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
    )
    for wanted in formats:
        text, reason = texts(app, CHAT | NO_SPACE | wanted | {"seed": seed})
        assert reason == "stop"
        value = json.loads(text)
        assert value.keys() == {"ok", "kind"}
        assert isinstance(value["ok"], bool)
        assert value["kind"] in ("cat", "dog")


def test_json_objects(app: FastAPI) -> None:
    """A random model may not come to an end, but it begins as JSON does."""
    text, reason = texts(app, CHAT | NO_SPACE | {"response_format": {"type": "json_object"}})
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)


def test_completions_follow_grammars_too(app: FastAPI) -> None:
    (reply,) = post(app, {"prompt": "hello", "structured_outputs": {"regex": "[xy]{5}"}})
    assert re.fullmatch("[xy]{5}", reply.json()["choices"][0]["text"])


def test_text_is_free(app: FastAPI) -> None:
    one, other = post(app, CHAT | {"max_tokens": 20}, CHAT | {"max_tokens": 20, "response_format": {"type": "text"}})
    assert one.json()["choices"] == other.json()["choices"]


def test_the_official_client_asks_for_schemas_and_passes_tools(app: FastAPI) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    tool = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": {"type": "object"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    with listening(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            **CHAT | NO_SPACE, model="tiny", tools=[tool], tool_choice="auto", response_format=wanted
        )
        assert json.loads(answer.choices[0].message.content).keys() == {"ok", "kind"}
        history = [*CHAT["messages"], answer.choices[0].message, *CHAT["messages"]]  # an answer can be sent back
        again = client.chat.completions.create(**CHAT | {"messages": history, "max_tokens": 9}, model="tiny")
        assert again.choices[0].message.role == "assistant"


def test_a_grammar_that_holds_up_the_others_is_refused(app: FastAPI, llm: LLM) -> None:
    (a,) = llm.encode("a")
    nested = {"structured_outputs": {"regex": "((a{0,100}){0,100}){0,100}"}, "logit_bias": {str(a): 100}}
    slow, free = post(app, CHAT | nested, CHAT | {"max_tokens": 20})
    assert slow.status_code == 400, slow.text
    assert slow.json()["error"]["param"] == "structured_outputs"
    assert "more than 50 ms" in slow.json()["error"]["message"]
    assert free.status_code == 200


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs", "regular expression cannot be used"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "JSON schema cannot be used"),
        ({"structured_outputs": {}}, "structured_outputs", "either regex or json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with the type"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "does not go with"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "does not go with"),
    ],
)
def test_what_cannot_be_followed(app: FastAPI, changes: dict[str, Any], param: str, said: str) -> None:
    (reply,) = post(app, CHAT | changes)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
