"""On the default target: replay is live decoding cycle by cycle, and wall time is the sum of its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.bench.plan import Prompt, line_up, make_groups, prompt_seed
from secondguess.bench.replay import read, replay
from secondguess.bench.report import Findings
from secondguess.bench.runner import Bench, audit_all, run
from secondguess.bench.store import Store
from secondguess.bench.transcript import TranscriptStore, record
from secondguess.engine import thread
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.speculate import Draw
from secondguess.methods import make_speculator, parse_method
from secondguess.target.load import load_target

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]
TREE = TreeConfig(budget=24)
SEED, NUM_TOKENS = 5, 32
SUBJECTS = ("rivers", "bread", "chess", "bees", "glass")
FORMS = (
    "Tell me three facts about {}.",
    "Write a Python function about {}.",
    "A shop sells {} for 4 coins each. What do 7 cost?",
    "Write a short poem about {}.",
)


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(target) -> list[Prompt]:
    llm = LLM(target, method="ar", max_batch_size=1, max_model_len=256)
    asked = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    return [Prompt("own", q, llm.encode([{"role": "user", "content": q}])) for q in asked]


def same(live: CycleTrace, replayed: CycleTrace, row: int) -> bool:
    """Trees and verdicts of the one request and of the row of a batch. Scores may round differently."""
    size, n = int(live.tree.valid_RN.sum()), int(live.verdict.num_emitted_R[0])
    pairs = [
        (getattr(live.tree, name)[0, :size], getattr(replayed.tree, name)[row, :size])
        for name in ("tokens_RN", "parents_RN", "depths_RN", "levels_RN")
    ] + [(live.verdict.tokens_RD[0, :n], replayed.verdict.tokens_RD[row, :n])]
    counts = int(replayed.tree.valid_RN[row].sum()), int(replayed.verdict.num_emitted_R[row])
    return counts == (size, n) and all(a.equal(b) for a, b in pairs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("typed", ["pr", "eagle3.1", "pr:coupled=true"])
def test_replay_is_live_decoding(target, prompts, typed: str, temperature: float, tmp_path: Path) -> None:
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=NUM_TOKENS)
    plain = LLM(target, method="ar", max_batch_size=4, max_model_len=256)
    texts = record(plain, prompts, params, TranscriptStore(tmp_path, {}), lambda n: None)
    llm = LLM(target, method=typed, tree=TREE, max_batch_size=1, max_model_len=256)
    live: list[list[CycleTrace]] = []
    for p in prompts:
        own = SamplingParams(temperature=temperature, seed=prompt_seed(SEED, p.id), max_tokens=NUM_TOKENS)
        live.append([llm.last_trace for _ in llm.stream(p.ids, own) if llm.last_trace])
    replayed: list[list[tuple[CycleTrace, int]]] = [[] for _ in prompts]

    def keep(running, trace: CycleTrace) -> None:
        for r, i in enumerate(running):
            replayed[i].append((trace, r))

    speculator = thread.run(make_speculator, parse_method(typed, TREE), target, None, len(prompts), 256)
    read_texts = [
        thread.run(read, target, t, Draw(temperature, prompt_seed(SEED, p.id)))
        for t, p in zip(texts, prompts, strict=True)
    ]
    thread.run(replay, speculator, read_texts, keep)
    assert sum(map(len, live)) > 150
    differing = [
        (p.id, number)
        for p, ours, theirs in zip(prompts, live, replayed, strict=True)
        for number, (trace, (other, row)) in enumerate(zip(ours, theirs, strict=True))
        if not same(trace, other, row)
    ]
    assert not differing


def test_wall_time_splits_within_2_percent(target, prompts, tmp_path: Path) -> None:
    methods = line_up(["ar", "eagle3.1", "pr"], [TREE])
    llms = {m: LLM(target, method=m.typed, tree=m.tree, max_batch_size=1, max_model_len=256) for m in methods}
    bench = Bench(llms, make_groups(prompts[:6], 1), 1, (0.0,), NUM_TOKENS, SEED)
    store = Store(tmp_path, {}, "r")
    run(bench, store, lambda result: None)
    for row in Findings(bench, store.results, audit_all(bench, store.results)).totals():
        parts = sum(row[f"{part}_ms"] for part in ("draft", "verify", "walk", "rest"))
        assert parts == pytest.approx(row["cycle_ms"])
        assert 0 <= row["unaccounted"] < 0.02, row["method"]
