"""The scripts that put clients on a server: what they measure, and what they complain of."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import httpx

from docs_commands import ROOT
from ports import free_port
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
    assert script("soak").main([url, "--minutes", "0.1", "--users", "6", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["rows"][0]
    assert found["unruly"]["counts"]["finished"] > 0
    assert found["unruly"]["counts"]["cancelled"] > 0
    for name in script("soak").SUMS:
        assert found["counted"]["server"][name] == found["counted"]["counts"][name] > 0
    assert found["complaints"] == []
    assert "all well" in capsys.readouterr().out


def test_users_ask_for_all_there_is(script: Any) -> None:
    soak, rng = script("soak"), random.Random(0)
    asked = [soak.question(rng, soak.Users(cancel=True, rule=True)) for _ in range(300)]
    fields = {name for _, body in asked for name in body}
    wanted = {"n", "stop", "logprobs", "presence_penalty", "repetition_penalty", "structured_outputs", "stream"}
    assert wanted <= fields
    assert {(path, "stream" in body) for path, body in asked} == {
        (path, stream) for path in ("/v1/chat/completions", "/v1/completions") for stream in (True, False)
    }


def test_a_server_that_dies_is_a_complaint(script: Any) -> None:
    soak, counts = script("soak"), Counter[str]()

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port()}") as client:
            await soak.one(client, random.Random(0), soak.Users(cancel=False, rule=False), counts)

    asyncio.run(ask())
    part = {"counts": dict(counts), "left": {}}
    assert "ConnectError" in "; ".join(soak.faults(part))


TOLD = {
    "generation_tokens_total": 500,
    "spec_decode_num_drafts_total": 100,
    "spec_decode_num_draft_tokens_total": 300,
    "spec_decode_num_accepted_tokens_total": 90,
}
GOOD: dict[str, Any] = {
    "minutes": 20.0,
    "users": 8,
    "unruly": {
        "counts": {"asked": 100, "finished": 70, "cancelled": 30},
        "server": {
            "request_success_total stop": 20,
            "request_success_total length": 52,
            "request_success_total abort": 27,
        },
        "left": {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0},
    },
    "counted": {
        "counts": {"asked": 10, "finished": 10, **TOLD},
        "server": {"request_success_total length": 10, **TOLD},
        "left": {"num_requests_running": 0.0},
    },
    "memory_mib": [],
}


@pytest.mark.parametrize(
    ("part", "place", "changes", "said"),
    [
        ("unruly", "counts", {}, ""),
        ("unruly", "counts", {"error Fault status 500": 1}, "status 500: 1"),
        ("counted", "counts", {"error Fault cut off": 1}, "cut off: 1"),
        ("unruly", "counts", {"finished": 73}, "72 ended, 27 dropped and 0 failed, we 73 of 100"),
        ("unruly", "server", {"request_success_total abort": 29}, "72 ended, 29 dropped"),
        ("unruly", "server", {"request_success_total error": 1}, "1 failed"),
        ("unruly", "left", {"num_requests_running": 1.0}, "num_requests_running is 1 after the end"),
        ("counted", "left", {"kv_cache_usage_perc": 0.1}, "kv_cache_usage_perc is 0.1"),
        ("counted", "server", {"generation_tokens_total": 499}, "generation_tokens_total is 499, and we got 500"),
        ("counted", "server", {"spec_decode_num_drafts_total": 101}, "drafts_total is 101, and we got 100"),
        ("counted", "server", {"request_success_total abort": 1}, "nobody left, but the server counts 10 ended and 1"),
    ],
)
def test_what_a_soak_complains_of(script: Any, part: str, place: str, changes: dict[str, float], said: str) -> None:
    changed = GOOD | {part: GOOD[part] | {place: GOOD[part][place] | changes}}
    wrong = script("soak").complaints(changed)
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


@pytest.mark.parametrize(
    ("code", "served_well", "said"),
    [(0, True, None), (3, True, "exit codes [3]"), (0, False, "the server ended with an error")],
)
def test_a_record_says_what_failed_and_holds_nothing_old(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, served_well: bool, said: str | None
) -> None:
    clients = script("clients")

    @contextmanager
    def server(*_: Any) -> Iterator[Any]:
        yield clients.Served("http://nowhere", 0)
        if not served_well:
            raise SystemExit("the server ended with an error: see its log")

    write = f"import pathlib, sys; pathlib.Path('new').touch(); sys.exit({code})"
    client = clients.Client(
        (), lambda _: [["python", "-c", write]], lambda f: {"files": sorted(p.name for p in f.iterdir())}
    )
    monkeypatch.setattr(clients, "server", server)
    monkeypatch.setattr(clients, "OUT", tmp_path)
    monkeypatch.setitem(clients.CLIENTS, "ours", client)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "old").touch()
    assert clients.run("ours", tmp_path, clients.QUICK) == (said is None)
    row = json.loads((tmp_path / "ours.json").read_text())["rows"][0]
    assert row["exit_codes"] == [code]
    assert (row["error"] is None) == (said is None)
    assert said is None or said in row["error"]
    assert row.get("files", ["log", "new"]) == ["log", "new"]


def test_a_command_that_hangs_is_ended(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = script("clients")
    monkeypatch.setattr(clients, "LIMIT_S", 0.5)
    child = "import subprocess; subprocess.run(['sleep', '60'])"
    with (tmp_path / "log").open("w") as log:
        assert clients.execute(Path(sys.executable).parent, ["python", "-c", child], tmp_path, log) == -signal.SIGKILL


def test_a_server_that_does_not_end_is_killed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = script("serving")
    monkeypatch.setattr(serving, "PATIENCE_S", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert serving.end(process) == -signal.SIGKILL


def test_programs_of_our_own_run_in_our_environment(script: Any) -> None:
    clients = script("clients")
    assert clients.environment("soak", clients.CLIENTS["soak"]) == Path(sys.executable).parent
