"""The page's files, and the extension of the API that it is made of."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from fastapi import FastAPI

from secondguess import LLM, SamplingParams
from secondguess.server.page import FILES
from test_server import CHAT, TEXT, TREE, app_with, assert_refused, events, get, post

DRAFTING = {"stream_options": {"drafting": True}}
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    others = ("ar", "ngram", "eagle3.1")
    return LLM(folder / "target", folder / "drafters" / "pr", others=others, tree=TREE, max_model_len=256)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder / "target", method="ar", max_model_len=256)


@pytest.fixture
def app(llm: LLM) -> FastAPI:
    return app_with(llm)


def told(parts: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """What a stream says of the drafts of a choice."""
    drafting = [part["drafting"] for part in parts if "drafting" in part]
    return [one for one in drafting if one["index"] == index]


def cycles(parts: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [cycle for one in told(parts, index) for cycle in one["cycles"]]


def asked(app: FastAPI, method: str, **changes: Any) -> list[dict[str, Any]]:
    return events(app, "/v1/completions", TEXT | DRAFTING | {"speculation": {"method": method}} | changes)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"drafting": False}])
def test_nothing_is_told_unless_it_is_asked_for(app: FastAPI, path: str, options: Any) -> None:
    body = (CHAT if "chat" in path else TEXT) | {"stream_options": options}
    assert all("drafting" not in part for part in events(app, path, body))
    assert_refused(post(app, path, body | DRAFTING), 400, "stream_options", "needs stream")


@pytest.mark.parametrize("method", ["ar", "ngram", "eagle3.1", "pr"])
def test_pieces_are_the_text(app: FastAPI, plain: LLM, method: str) -> None:
    parts = asked(app, method)
    pieces = [piece for one in told(parts) for piece in one["pieces"]]
    (output,) = plain.generate("hello", PARAMS)
    assert "".join(piece["text"] for piece in pieces) == output.text
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == output.text
    origins = {piece["origin"] for piece in pieces}
    assert "bonus" in origins
    if method == "ar":
        assert origins <= {"prefill", "bonus"}
    assert ("refined" in origins) <= (method == "pr")


@pytest.mark.parametrize("method", ["ar", "ngram", "eagle3.1", "pr"])
def test_accepted_paths_and_bonus_tokens_are_the_answer(app: FastAPI, plain: LLM, method: str) -> None:
    said = []
    for cycle in cycles(asked(app, method)):
        assert cycle["path"][0] == 0
        for parent, child in zip(cycle["path"], cycle["path"][1:], strict=False):
            assert cycle["parents"][child] == parent
        said += [*(cycle["tokens"][node] for node in cycle["path"][1:]), cycle["bonus"]]
    (output,) = plain.generate("hello", PARAMS)
    texts = [plain.decode([token]) for token in output.token_ids]
    assert said[: len(texts) - 1] == texts[1:]  # prefill's token is the first root; what lies past the limit is cut


def test_trees_are_those_that_were_drafted(app: FastAPI) -> None:
    parts = asked(app, "pr", stream_options={"drafting": True, "include_usage": True})
    counted = parts[-1]["metrics"]["speculative_decoding"]
    trees = cycles(parts)
    assert len(trees) == counted["num_spec_steps"]
    assert sum(len(tree["tokens"]) - 1 for tree in trees) == counted["num_draft_tokens"]
    assert sum(sum(tree["levels"]) for tree in trees) == counted["by_level"]["1"]["num_draft_tokens"] > 0
    assert sum(len(tree["path"]) - 1 for tree in trees) == counted["num_accepted_draft_tokens"]
    for tree in trees:
        assert len({len(tree[name]) for name in ("tokens", "parents", "levels", "probabilities")}) == 1
        assert (tree["parents"][0], tree["probabilities"][0], tree["levels"][0]) == (-1, None, 0)
        assert all(parent < node for node, parent in enumerate(tree["parents"]))
        for parent in set(tree["parents"][1:]):
            below = [p for p, its in zip(tree["probabilities"], tree["parents"], strict=True) if its == parent]
            assert all(0 <= p <= 1 for p in below)
            assert sum(below) <= 2.001, "at most one from each level"


def test_methods_without_a_drafter(app: FastAPI) -> None:
    assert {len(tree["tokens"]) for tree in cycles(asked(app, "ar"))} == {1}
    looked_up = cycles(asked(app, "ngram", prompt="abcabcabc"))
    assert max(len(tree["tokens"]) for tree in looked_up) > 1
    assert {p for tree in looked_up for p in tree["probabilities"]} == {None}
    assert all(len(tree["tokens"]) <= 1 + TREE.max_budget for tree in looked_up)


def test_every_choice_is_told_of(app: FastAPI) -> None:
    parts = events(app, "/v1/chat/completions", CHAT | DRAFTING | {"n": 3})
    for i in range(3):
        choices = [part["choices"][0] for part in parts if part["choices"]]
        said = "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == i)
        assert "".join(piece["text"] for one in told(parts, i) for piece in one["pieces"]) == said


# The files


def test_the_page_is_served_with_all_its_parts(app: FastAPI) -> None:
    page = get(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', page.text))
    for name in FILES:
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', get(app, f"/page/{name}").text))
    assert named | {"index.html"} == set(FILES)
    types = {name: get(app, f"/page/{name}").headers["content-type"].split(";")[0] for name in named}
    assert {types[name] for name in named if name.endswith(".js")} <= {"text/javascript", "application/javascript"}
    assert types["style.css"] == "text/css"
    assert types["icon.svg"] == "image/svg+xml"


def test_every_element_that_the_scripts_name_is_there() -> None:
    ids = re.findall(r' id="([^"]+)"', FILES["index.html"].read_text())
    assert len(ids) == len(set(ids))
    scripts = "".join(path.read_text() for path in FILES.values() if path.suffix == ".js")
    assert set(re.findall(r'(?:byId|number)\("([^"]+)"\)', scripts)) <= set(ids)


def test_nothing_comes_from_elsewhere() -> None:
    for name, path in FILES.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


@pytest.mark.parametrize("path", ["/page/none.js", "/page/", "/page/..%2fpage.py", "/page/../page.py"])
def test_nothing_but_the_page_is_served(app: FastAPI, path: str) -> None:
    assert get(app, path).status_code == 404


def test_the_page_needs_no_key_and_what_it_asks_for_does(llm: LLM) -> None:
    app = app_with(llm, api_key="secret")
    assert get(app, "/").status_code == get(app, "/page/main.js").status_code == 200
    for path in ("/server_info", "/pages", "/metrics", "/docs"):
        assert get(app, path).status_code == 401
