"""Peers: other engines decode in processes of their own, and what goes wrong there is marked, not dropped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter

from secondguess.bench.peers import known
from secondguess.bench.peers.known import KNOWN, PEER, Known, choose_peers, file_mode, make_peer
from secondguess.bench.peers.process import Peer
from secondguess.bench.plan import Prompt, make_groups
from secondguess.bench.report import Findings, markdown
from secondguess.bench.runner import Bench, audit_all, run
from secondguess.bench.store import Store
from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.methods import Method, parse_method
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_target
from secondguess.types import SamplingParams
from tiny_folder import save_tiny

WORKER = """
import os, sys
sys.path.insert(0, {folder!r})
from protocol import serve

def start(config):
    if config["how"] == "no start":
        raise ValueError("no such model")
    print("noise between the lines")

    def decode(request):
        if config["how"] == "die":
            os._exit(3)
        if config["how"] == "refuse" and request["prompt_ids"][0] == 7:
            raise ValueError("not this one")
        n = request["max_new_tokens"]
        drafts = {{"num_cycles": 2, "num_drafted": 6, "num_accepted": 3}} if config["how"] == "draft" else {{}}
        return {{"token_ids": list(range(n)), "prefill_s": 0.5, "decode_s": 0.25, **drafts}}

    return decode

serve(start, ("torch",))
"""


@pytest.fixture
def peer(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(folder=str(Path(known.__file__).parent)))
    made: list[Peer] = []

    def make(how: str, mode: str = "float32") -> Peer:
        made.append(Peer(Path(sys.executable), str(worker), {"how": how}, [99], tmp_path / "log", mode))
        return made[-1]

    yield make
    for p in made:
        p.close()


def decode(peer: Peer, *prompts: tuple[int, ...]):
    return peer.generate(prompts, [SamplingParams(max_tokens=5)] * len(prompts))


def test_a_peer_answers_in_order_and_says_what_it_is(peer) -> None:
    ballast = bytearray(b"x") * (1 << 28)
    mine = len(ballast)  # at least: a peer does not count what we have
    ours = peer("fine")
    first, second = decode(ours, (1,), (2, 3))
    assert first.token_ids == second.token_ids == (0, 1, 2, 3, 4)
    assert first.stats.tokens_per_second == 4 / 0.25
    assert first.stats.prefill_s == 0.5
    assert first.finish_reason == "length"
    assert second.prompt_ids == (2, 3)
    assert set(ours.versions) == {"torch"}
    assert 1 << 20 < ours.peak_memory_bytes < mine


def test_a_peer_that_drafts_tells_how_much_of_it_was_right(peer, tmp_path: Path) -> None:
    [output] = decode(peer("draft"), (1,))
    assert output.stats.acceptance_length == 2.5
    assert output.stats.num_drafted == 6
    bench = bench_with(tiny_target("llama", dtype=torch.float32), {"vllm": peer("draft"), "llama.cpp": peer("fine")})
    rows = {r["method"]: r for r in finish(bench, tmp_path).block("t", 0.0)}
    assert rows["vllm"]["acceptance_length"] == 2.5
    assert rows["vllm"]["cycle_ms"] == 125.0
    assert rows["vllm"]["draft_ms"] is rows["vllm"]["verify_ms"] is None
    assert rows["llama.cpp"]["acceptance_length"] is None


@pytest.mark.parametrize(("how", "said"), [("no start", "ValueError: no such model"), ("die", "exit code 3, see ")])
def test_a_peer_that_fails_says_why_each_time(peer, how: str, said: str) -> None:
    ours = peer(how)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=said):
            decode(ours, (1,))


def bench_with(target: HFTarget, peers: dict[str, Peer], rounds: int = 1) -> Bench:
    plain = parse_method("ar", TreeConfig())
    llms = {plain: LLM(target, method="ar", max_batch_size=1, max_model_len=64)}
    others = {Method(name, PEER, TreeConfig()): p for name, p in peers.items()}
    prompts = [Prompt("t", str(i), (7 if i == 1 else i + 1, 2)) for i in range(3)]
    return Bench(llms, make_groups(prompts, 1), 1, (0.0, 1.0), 8, 0, rounds, others)


def finish(bench: Bench, folder: Path) -> Findings:
    store = Store(folder, {}, "r")
    run(bench, store, lambda result: None)
    return Findings(bench, store.results, audit_all(bench, store.results))


def test_a_failed_request_is_marked_and_tried_again(peer, tmp_path: Path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    findings = finish(bench_with(target, {"llama.cpp": peer("refuse"), "vllm": peer("die")}), tmp_path)
    rows = {(r["method"], r["temperature"]): r for r in findings.rows()}
    assert set(rows) == {("ar", 0.0), ("ar", 1.0), ("llama.cpp", 0.0), ("vllm", 0.0)}
    some, none = rows["llama.cpp", 0.0], rows["vllm", 0.0]
    assert (some["num_prompts"], some["num_failed"], some["error"]) == (2, 1, "RuntimeError: ValueError: not this one")
    assert some["peak_memory_bytes"] > 1 << 20
    assert (none["num_prompts"], none["num_failed"]) == (0, 3)
    assert len([line for line in findings.complaints() if line.startswith("FAILED: vllm")]) == 3
    assert "3 failed" in markdown([none])
    assert not findings.audits
    again = finish(bench_with(target, {"llama.cpp": peer("fine"), "vllm": peer("fine")}), tmp_path)
    assert all(row["num_failed"] == 0 and row["num_prompts"] == 3 for row in again.rows())


def test_speedup_over_the_fastest_plain_decoder_of_the_same_numbers(peer, tmp_path: Path) -> None:
    bench = bench_with(
        tiny_target("llama", dtype=torch.float32), {"transformers": peer("fine"), "llama.cpp": peer("fine", "int4")}, 2
    )
    rows = {r["method"]: r for r in finish(bench, tmp_path).block("t", 0.0)}
    assert rows["transformers"]["tokens_per_second"] == pytest.approx(7 / 0.25)
    fastest = max(rows["ar"]["tokens_per_second"], 7 / 0.25)
    assert rows["ar"]["speedup_vs_fastest_plain"] == pytest.approx(rows["ar"]["tokens_per_second"] / fastest)
    assert rows["ar"]["mode"] == rows["transformers"]["mode"] == "float32"
    assert rows["llama.cpp"]["mode"] == "int4"
    assert rows["llama.cpp"]["speedup_vs_fastest_plain"] == 1.0
    assert rows["ar"]["num_rounds"] == 2
    assert rows["ar"]["num_prompts"] == 3


@pytest.mark.parametrize("name", ["transformers", "transformers:lookup"])
def test_transformers_writes_what_we_write(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    target = load_target(str(tmp_path / "target"), "float64")
    forms = {"folder": tmp_path / "target", "gguf": None}
    common = {"threads": 1, "dtype": "float64", "max_len": 64, "drafter": None, "trust_remote_code": False}
    peer = make_peer(name, forms, common, [0], tmp_path / "log")
    prompts = [(1, 2, 3), (9, 8, 7, 6, 5, 4)]
    params = [SamplingParams(max_tokens=20)] * 2
    try:
        theirs = peer.generate(prompts, params)
    finally:
        peer.close()
    ours = LLM(target, method="ar", max_batch_size=1, max_model_len=64).generate(prompts, params)
    assert [o.token_ids for o in theirs] == [o.token_ids for o in ours]
    assert all(o.stats.decode_s > 0 and o.stats.prefill_s > 0 for o in theirs)


def test_which_peers_take_part(monkeypatch, tmp_path: Path) -> None:
    forms = {"folder": tmp_path, "gguf": None}
    absent = Known(engine="none", package="no_such_package", worker="w.py")
    monkeypatch.setitem(KNOWN, "none", absent)
    assert choose_peers(["transformers", "transformers"], forms) == ["transformers"]
    assert "transformers:lookup" in choose_peers(["installed"], forms)
    assert not {"none", "llama.cpp"} & set(choose_peers(["installed"], forms))
    with pytest.raises(UserError, match=r"unknown peer 'lama\.cpp'; did you mean llama\.cpp"):
        choose_peers(["lama.cpp"], forms)
    with pytest.raises(UserError, match=r"peer none is not installed: make an environment with it in .*peers/none"):
        choose_peers(["none"], forms)
    monkeypatch.setattr(known, "find_python", lambda k: Path(sys.executable))
    with pytest.raises(UserError, match=r"peer llama\.cpp needs the target as a \.gguf file"):
        choose_peers(["llama.cpp"], forms)


def test_numbers_of_a_gguf_file_and_of_weight_only_forms(tmp_path: Path) -> None:
    for format_, mode in ((3, "int4"), (7, "int8"), (17, "MOSTLY_Q5_K_M")):
        path = tmp_path / f"{format_}.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_file_type(format_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert file_mode(path) == mode
    save_tiny(tmp_path)
    for dtype, mode in (("float64", "float64"), ("int8", "int8")):
        assert load_target(str(tmp_path / "target"), dtype).spec.mode == mode
