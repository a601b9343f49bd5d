"""The scripts that put clients on a server: what they measure, and what they complain of."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from docs_commands import ROOT
from secondguess import LLM, TreeConfig
from secondguess.server.app import make_app
from secondguess.server.service import Service
from secondguess.server.settings import Settings
from test_server_faults import listening
from tiny_folder import save_tiny

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)
QUESTIONS = ("why?", "how?", "when?")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server whose K/V room is short, too."""
    folder, others = save_tiny(tmp_path_factory.mktemp("tiny")), ("ar", "ngram", "eagle3.1")
    room = {"max_batch_size": 4, "max_model_len": 256, "kv_cache_tokens": 300}
    llm = LLM(folder / "target", folder / "drafters" / "pr", others=others, tree=TREE, **room)
    with listening(make_app(Service(llm, "tiny", Settings()))) as url:
        yield url


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def load(name: str) -> ModuleType:
        return import_module(name)

    return load


# The soak


def test_a_server_is_soaked(script: Any, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    assert script("soak").main([url, "--minutes", "0.06", "--users", "6", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["rows"][0]
    assert found["counts"]["finished"] > 0
    assert found["counts"]["cancelled"] > 0
    assert found["server"]["generation_tokens_total"] >= found["counts"]["tokens"] > 0
    assert found["complaints"] == []
    assert "all well" in capsys.readouterr().out


GOOD: dict[str, Any] = {
    "minutes": 20.0,
    "users": 8,
    "counts": {"finished": 70, "cancelled": 30, "tokens": 5000, "errors in streams": 0},
    "server": {
        "request_success_total stop": 20,
        "request_success_total length": 52,
        "request_success_total abort": 28,
        "generation_tokens_total": 5400,
    },
    "left": {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0},
    "memory_mib": [],
}


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("counts", {}, ""),
        ("counts", {"status 500": 1}, "status 500: 1"),
        ("counts", {"errors in streams": 2}, "errors in streams: 2"),
        ("counts", {"cut off": 1}, "cut off: 1"),
        ("counts", {"finished": 71}, "the server counts 72 ended and 28 dropped, we 71 of 101"),
        ("server", {"request_success_total abort": 29}, "72 ended and 29 dropped"),
        ("server", {"generation_tokens_total": 4999}, "fewer tokens than it sent"),
        ("left", {"num_requests_running": 1.0}, "num_requests_running is 1 after the end"),
        ("left", {"kv_cache_usage_perc": 0.1}, "kv_cache_usage_perc is 0.1"),
    ],
)
def test_what_a_soak_complains_of(script: Any, part: str, changes: dict[str, float], said: str) -> None:
    wrong = script("soak").complaints(GOOD | {part: GOOD[part] | changes})
    assert said in "; ".join(wrong)
    assert bool(wrong) == bool(said)


def test_memory_that_grows(script: Any) -> None:
    rng, complain = random.Random(0), script("soak").memory_complaints
    noise = [rng.uniform(-40, 40) for _ in range(120)]
    assert complain([1000 + x for x in noise], 20) == []
    assert complain([1000 + x + min(300, 20 * i) for i, x in enumerate(noise)], 20) == []  # once, at first
    assert "memory grows by" in complain([1000 + x + 2 * i for i, x in enumerate(noise)], 20)[0]
    assert complain([1500 + x / 4 + 200 / 3 * i / 120 for i, x in enumerate(noise)], 20), "200 MiB an hour"
    assert complain([], 20) == []


# Throughput


def test_throughput_is_measured(script: Any, url: str) -> None:
    throughput, written = script("throughput"), list[int]()
    args = Namespace(rounds=2, at_once=[1, 3], arms=["plain", "served", "ngram"])

    async def run() -> list[Any]:
        load = throughput.Load(url, "tiny", QUESTIONS, max_tokens=12, num_requests=4)
        return await throughput.measure(load, args, lambda cells: written.append(len(cells)))

    cells = asyncio.run(run())
    assert written == [0, 6, 12]
    assert [(c.round, c.arm) for c in cells if c.at_once == 1] == [
        (1, "ngram"), (1, "served"), (1, "plain"), (2, "plain"), (2, "served"), (2, "ngram"),
    ]  # fmt: skip
    assert {c.tau for c in cells if c.arm == "plain"} == {1.0}
    assert all(c.tokens_per_second > 0 and c.first_token_ms > 0 and c.request_s > 0 for c in cells)
    rows = throughput.summary(cells, args.arms)
    assert [(row["at_once"], row["arm"]) for row in rows] == [(n, arm) for n in (1, 3) for arm in args.arms]
    assert rows[0]["speedup"] == [1.0, 1.0, 1.0]
    assert len(throughput.table(rows).splitlines()) == 2 + len(rows)


def test_an_answer_that_is_not_plain_decodings_ends_the_measurement(script: Any, url: str) -> None:
    throughput = script("throughput")

    async def run() -> None:
        load = throughput.Load(url, "tiny", QUESTIONS, max_tokens=12, num_requests=1)
        load.texts[QUESTIONS[0]] = "something else"
        await load.cell(1, 1, "served")

    with pytest.raises(SystemExit, match="did not write plain decoding's answer to 'why"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([5.0], [5, 5, 5]),
        ([3, 1, 2], [2, 1, 3]),
        ([7, 1, 2, 6, 3, 5, 4], [4, 1, 7]),  # 98 %; without the ends 88 %
        ([9, 1, 2, 8, 3, 7, 4, 6, 5], [5, 2, 8]),  # 96 %
    ],
)
def test_the_interval_of_a_median(script: Any, values: list[float], found: list[float]) -> None:
    assert script("throughput").with_interval(values) == found


def test_the_other_arms_are_compared_with_plain_decoding(script: Any, tmp_path: Path) -> None:
    parse, out = script("throughput").parse, str(tmp_path / "out.json")
    args = parse([out, "--at-once", "1,2", "--", "--budget", "3"])
    assert (args.at_once, args.arms, args.flags) == ([1, 2], ["plain", "served"], ["--budget", "3"])
    with pytest.raises(SystemExit):
        parse([out, "--arms", "pr,plain"])


# Other people's clients


def write_run(folder: Path, texts: list[str], score: float) -> None:
    folder.mkdir(parents=True)
    rows = [{"doc_id": i, "resps": [[text]]} for i, text in enumerate(texts)]
    (folder / "samples_gsm8k_here_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"results": {"gsm8k_here": {"exact_match,last-number": score}}}
    (folder / "results_1.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("texts", "score", "same"),
    [(["5", "7"], 0.5, True), (["5", "8"], 0.5, False), (["5", "7"], 1.0, False), (["5"], 0.5, False)],
)
def test_drafted_and_plain_answers_are_compared(
    script: Any, tmp_path: Path, texts: list[str], score: float, same: bool
) -> None:
    write_run(tmp_path / "drafted" / "model", texts, score)
    write_run(tmp_path / "plain" / "model", ["5", "7"], 0.5)
    compare = script("lm_eval_task").compare
    if same:
        assert compare(tmp_path)["num_same_answers"] == 2
    else:
        with pytest.raises(SystemExit, match="answers differ"):
            compare(tmp_path)


def test_aiperf_has_to_show_its_table(script: Any, tmp_path: Path) -> None:
    found = script("clients").found_by_aiperf
    (tmp_path / "profile_export_aiperf.json").write_text('{"pooled_spec_decode_acceptance_histogram": {"0": 3}}')
    (tmp_path / "log").write_text("NVIDIA AIPerf: Spec Decode")
    assert found(tmp_path) == {"pooled_spec_decode_acceptance_histogram": {"0": 3}}
    (tmp_path / "log").write_text("NVIDIA AIPerf")
    with pytest.raises(SystemExit, match="no Spec Decode table"):
        found(tmp_path)


def test_unknown_clients_are_named(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("clients").main(["nobody"])
    assert "no client 'nobody': there are schemathesis, guidellm" in capsys.readouterr().err


def test_programs_of_our_own_run_in_our_environment(script: Any) -> None:
    clients = script("clients")
    assert clients.environment("soak", clients.CLIENTS["soak"]) == Path(sys.executable).parent
