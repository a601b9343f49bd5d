"""An OpenAI-compatible server as the answerer: the same files as our engine's, whatever the server's moods."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from secondguess.cli import main
from secondguess.llm import LLM
from secondguess.prepare import post
from secondguess.types import SamplingParams
from tiny_folder import byte_tokenizer, save_tiny

Body = dict[str, Any]
Trouble = int | str  # a status, "hang" or "cut"


class Api(ThreadingHTTPServer):
    """Answers what ``reply`` makes of a request's body; but first, ``troubles`` befall one request each."""

    daemon_threads = True

    def __init__(self, reply: Callable[[Body], Body | bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.troubles: list[Trouble] = []
        self.headers: dict[str, str] = {}  # with each trouble
        self.requests: list[tuple[str, Body, str | None]] = []
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def enter(self, path: str, body: Body, key: str | None) -> Trouble | None:
        with self.lock:
            self.requests.append((path, body, key))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return self.troubles.pop(0) if self.troubles else None

    def leave(self) -> None:
        with self.lock:
            self.in_flight -= 1


class Handler(BaseHTTPRequestHandler):
    server: Api  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        trouble = self.server.enter(self.path, body, self.headers.get("Authorization"))
        found = trouble or self.server.reply(body)
        self.server.leave()
        if isinstance(found, int):
            self.send(found, b"not now,\n  please", self.server.headers)
        elif isinstance(found, bytes):
            self.send(200, found, {})
        elif isinstance(found, dict):
            self.send(found.get("status", 200), json.dumps(found).encode(), {})
        elif found == "hang":
            time.sleep(1.5)
        # "cut": the connection ends without a word

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


def choice(text: str, reason: str = "stop", **more: Any) -> Body:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason, **more}]}


def echo(body: Body) -> Body:
    """Knows no token ids. Says how it ended in the text."""
    said = body["messages"][-1]["content"]
    return choice(f"You said {said}", "length" if "long" in said else "stop")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Api]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(post, "FIRST_WAIT_S", 0.01)
    save_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"p{i}", "turns": [f"question {i}", "and then?"][: 1 + i % 2]} for i in range(6)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = Api(echo)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def prepare(*more: str) -> int:
    fixed = ("--out", "answers.jsonl", "--max-new-tokens", "12", "--batch-size", "3")
    return main(["prepare", "target", "prompts.jsonl", *fixed, *more])


def answers() -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, Path("answers.jsonl").read_text().splitlines())}


def said(id_: str) -> tuple[str, list[int]]:
    """The text of an answer without special tokens, and its tokens."""
    row = answers()[id_]
    tokens = row["input_ids"][row["prompt_len"] :]
    return str(byte_tokenizer().decode(tokens, skip_special_tokens=True)), tokens


def test_the_files_are_those_of_our_engine(api: Api) -> None:
    assert prepare() == 0
    ours = answers()
    Path("answers.jsonl").unlink()
    llm = LLM("target", method="ar")

    def reply(body: Body) -> Body:
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
        params = SamplingParams(**{name: body[name] for name in names}, top_k=max(body["top_k"], 0))
        prompt_ids = llm.encode(body["messages"])
        [output] = llm.generate([prompt_ids], params)
        assert body["return_token_ids"] is True
        found = choice(output.text, output.finish_reason, token_ids=output.token_ids)
        return found | {"prompt_token_ids": prompt_ids}

    api.reply, api.troubles = reply, [429, 500, "cut"]
    assert prepare("--endpoint", api.url, "--model", "tiny") == 0
    assert answers() == ours
    assert len(api.requests) == 9 + 3
    assert {(path, body["model"]) for path, body, _ in api.requests} == {("/v1/chat/completions", "tiny")}


def test_the_server_s_own_sampling_defaults_are_not_asked_for(api: Api) -> None:
    """What a generation_config.json says counts where a request says nothing."""
    assert prepare("--endpoint", api.url, "--top-k", "7", "--temperature", "1") == 0
    asked = [{name: body.get(name) for name in ("top_k", "min_p", "repetition_penalty")} for _, body, _ in api.requests]
    assert asked[0] == {"top_k": 7, "min_p": 0, "repetition_penalty": 1}
    assert {body["top_p"] for _, body, _ in api.requests} == {1}
    Path("answers.jsonl").unlink()
    api.requests.clear()
    api.reply = lambda body: {"status": 400} if "min_p" in body else echo(body)
    assert prepare("--endpoint", api.url, "--temperature", "0", "--batch-size", "1") == 0
    assert api.requests[0][1]["top_k"] == -1
    assert all("top_k" not in body and body["top_p"] == 1 for _, body, _ in api.requests[1:])


def test_a_conversation_that_the_server_refuses_is_left_out(api: Api, capsys) -> None:
    """Also when it is the first to be asked for; whoever refuses everything is another matter (below)."""
    said = {"status": 400, "error": "maximum context length is 4096 tokens"}
    api.reply = lambda body: said if "question 1" in str(body["messages"]) else echo(body)
    assert prepare("--endpoint", api.url) == 0
    assert set(answers()) == {"p0", "p2", "p3", "p3#2", "p4", "p5", "p5#2"}
    shown = " ".join(capsys.readouterr().err.split())
    assert "2 turns left out: no room for an answer" in shown
    Path("prompts.jsonl").write_text('{"id": "p1", "turns": ["question 1"]}\n{"id": "p9", "turns": ["a longer one"]}\n')
    assert prepare("--endpoint", api.url, "--batch-size", "1") == 0
    assert "p9" in answers()


def test_text_is_tokenised_and_ends_only_where_it_ended(api: Api) -> None:
    rows = [{"id": "a", "turns": ["short", "again"]}, {"id": "b", "turns": ["long"]}]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare("--endpoint", api.url, "--temperature", "0") == 0
    encode = byte_tokenizer().encode
    assert said("a") == ("You said short", [*encode("You said short"), 0])
    assert said("b") == ("You said long", encode("You said long"))
    prompt = encode("short\nYou said short\nagain\n")
    assert answers()["a#2"]["input_ids"] == [*prompt, *encode("You said again"), 0]
    assert api.requests[0][1]["model"] == "target"


@pytest.mark.parametrize(
    "found",
    [
        choice("half \N{REPLACEMENT CHARACTER}<end> a word"),  # the special token would not come back as text
        {"choices": [{"message": {"content": "42", "reasoning_content": "Hm."}, "finish_reason": "stop"}]},
        choice("Hm", "content_filter"),
        choice("", "length"),
    ],
)
def test_an_answer_in_tokens_that_are_not_certain_is_left_out(found, api: Api, capsys) -> None:
    api.reply = lambda body: found if "question 1" in str(body["messages"]) else echo(body)
    assert prepare("--endpoint", api.url) == 0
    assert set(answers()) == {"p0", "p2", "p3", "p3#2", "p4", "p5", "p5#2"}
    assert "2 turns left out: tokens of the answer not certain" in capsys.readouterr().err


def test_a_server_that_takes_no_unknown_fields_is_not_asked_for_ids_again(api: Api) -> None:
    api.reply = lambda body: {"status": 400} if "return_token_ids" in body else echo(body)
    assert prepare("--endpoint", api.url, "--batch-size", "1") == 0
    assert len(answers()) == 9
    assert [("return_token_ids" in body) for _, body, _ in api.requests] == [True] + [False] * 9


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (lambda body: {"status": 401, "error": "no key"}, 2, ["refuses (401", "no key", "OPENAI_API_KEY"]),
        (lambda body: {"status": 400, "error": "too long"}, 2, ["refuses (400", "too long"]),
        (lambda body: {"status": 503}, 1, ["failed 6 times (503", "the same command goes on from here"]),
        (lambda body: {"status": 200}, 2, ["does not answer as OpenAI's API does (KeyError('choices')"]),
        (lambda body: {"choices": []}, 2, ["does not answer as OpenAI's API does"]),
        (lambda body: b"<html>", 2, ["does not answer in JSON"]),
        (lambda body: b"[1]", 2, ["does not answer in JSON"]),
        (lambda body: echo(body) | {"prompt_token_ids": [7]}, 2, ["template mismatch: token 0 is", "on the server"]),
        (
            lambda body: echo(body) | {"usage": {"prompt_tokens": 99}},
            2,
            ["the prompt has", "here, and 99 on the server"],
        ),
    ],
)
def test_what_cannot_go_on_is_one_line(reply, code, words, api: Api, capsys) -> None:
    api.reply = reply
    assert prepare("--endpoint", api.url) == code
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("secondguess: ")
    for word in words:
        assert word in err[-1]


def test_nobody_there(api: Api, capsys) -> None:
    url = api.url
    api.shutdown()
    api.server_close()
    assert prepare("--endpoint", url) == 2
    assert f"nothing answers at {url}: start the server" in capsys.readouterr().err


def test_a_run_that_failed_goes_on(api: Api) -> None:
    asked = iter(range(100))
    api.reply = lambda body: {"status": 401} if next(asked) >= 4 else echo(body)
    assert prepare("--endpoint", api.url, "--batch-size", "1") == 2
    before = answers()
    assert len(before) == 4
    api.reply, api.requests = echo, []
    assert prepare("--endpoint", api.url) == 0
    assert len(api.requests) == 5
    assert answers().items() >= before.items()


def test_no_more_are_asked_at_once_than_allowed(api: Api) -> None:
    def slow(body: Body) -> Body:
        time.sleep(0.02)
        return echo(body)

    api.reply = slow
    assert prepare("--endpoint", api.url) == 0
    assert api.most_in_flight == 3


def test_the_key_is_sent_and_told_nobody(api: Api, capsys, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    assert prepare("--endpoint", api.url, "--json", "result.json") == 0
    assert {key for _, _, key in api.requests} == {"Bearer sk-secret"}
    out, err = capsys.readouterr()
    assert "secret" not in out + err + Path("result.json").read_text() + Path("answers.jsonl").read_text()


def test_waits_double_and_the_server_may_ask_for_longer(api: Api, monkeypatch) -> None:
    waits = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:  # the libraries below yield with 0
            waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(post, "FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(asyncio, "sleep", note)
    Path("prompts.jsonl").write_text('{"id": "a", "turns": ["Hi"]}\n')
    api.troubles = [500] * 4
    assert prepare("--endpoint", api.url) == 0
    assert all(low <= wait <= 2 * low for low, wait in zip((0.5, 1, 2, 4), waits, strict=True))
    Path("answers.jsonl").unlink()
    waits.clear()
    api.troubles += [429, 429]
    api.headers = {"Retry-After": "7"}
    assert prepare("--endpoint", api.url) == 0
    assert waits == [7, 7]


def test_an_answer_that_does_not_come_is_asked_for_again(api: Api, monkeypatch) -> None:
    monkeypatch.setattr(post, "TIMEOUT_S", 1.0)
    api.troubles = ["hang"]
    assert prepare("--endpoint", api.url) == 0
    assert len(answers()) == 9
    assert len(api.requests) == 10


def test_prompts_may_be_synthesised_there(api: Api) -> None:
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
    byte_tokenizer(template).save_pretrained("target")

    def reply(body: Body) -> Body:
        if "messages" in body:
            return echo(body)
        assert body["prompt"] == byte_tokenizer().encode("user:")
        return {"choices": [{"text": f" What of topic {body['seed']}? ", "finish_reason": "stop"}]}

    api.reply = reply
    command = ["prepare", "target", "--out", "answers.jsonl", "--synthesize", "3", "--max-new-tokens", "12"]
    assert main([*command, "--endpoint", api.url]) == 0
    prompts = [json.loads(line) for line in Path("answers.prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in prompts] == [f"synthesised/target/0/{n}" for n in range(3)]
    for row in prompts:
        assert said(row["id"])[0] == f"You said {row['turns'][0]}"
