"""Bench: metrics of hand-made traces, resuming, the audit of mismatches, and the command from flags to files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from secondguess.bench import metrics
from secondguess.bench.audit import Choice, Job, audit, first_difference, judge
from secondguess.bench.plan import Prompt, line_up, make_groups, prompt_seed, shape
from secondguess.bench.report import Findings, markdown
from secondguess.bench.result import Key, Result
from secondguess.bench.runner import Bench, audit_all, run, turns
from secondguess.bench.store import Store
from secondguess.cli import main
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import save_drafter
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import SamplingParams, Stats

SMALL = TreeConfig(budget=6, num_steps=3)


# ---- metrics


def result(tokens=10, cycles=5, accepted=5, seconds=1.0, ids=(1, 2), group=0, prefill=0.1, id="a") -> Result:
    """Draft, verify, walk and rest take 1, 6, 2 and 1 tenths of ``seconds``."""
    times = prefill, 0.1 * seconds, 0.6 * seconds, 0.2 * seconds, 0.1 * seconds
    stats = Stats(tokens, cycles, accepted, 0, *times, num_drafted=5 * cycles, num_steps=8 * cycles)
    wall = (seconds + prefill) / 0.8
    return Result(Key("t", id, "m", 0, 0.0), group, 0, "length", tuple(ids), "", stats, wall_s=wall)


def test_metrics_equal_hand_computed_numbers() -> None:
    loop, flow = (7, 8) * 20, tuple(range(40))
    plain = [
        result(40, 40, 0, 4.0, flow, 0, 0.1),  # 10 tokens/s
        result(40, 40, 0, 2.0, loop, 1, 0.3, "b"),  # 20 tokens/s
    ]
    ours = [
        result(40, 20, 21, 1.0, flow, 0, 0.2),  # 40 tokens/s, one accepted token cut off
        result(40, 10, 30, 1.0, loop[:-1], 1, 0.4, "b"),  # 40 tokens/s
    ]
    assert metrics.measure(ours, plain) == pytest.approx(
        {
            "num_prompts": 2,
            "num_tokens": 80,
            "num_cycles": 30,
            "acceptance_length": 81 / 30,
            "acceptance_length_nonlooping": 41 / 20,
            "acceptance_length_mean": (41 / 20 + 40 / 10) / 2,
            "mean_nodes": 5.0,
            "mean_steps": 8.0,
            "tokens_per_second": 40.0,
            "speedup_low": 2.0,  # of two prompts, a resample is both of one, or one of each
            "speedup_high": 4.0,
            "speedup_median": 3.0,
            "speedup_median_low": 2.0,
            "speedup_median_high": 4.0,
            "peak_memory_bytes": 0,
            "num_failed": 0,
            "error": None,
            "speedup_vs_ar": 3.0,  # 80 / 2 s over 80 / 6 s
            "speedup_micro": 3.0,
            "speedup_macro": (4.0 + 2.0) / 2,
            "speedup_nonlooping": 4.0,
            "speedup_nonlooping_low": 4.0,
            "speedup_nonlooping_high": 4.0,
            "cycle_ms": 2000 / 30,
            "draft_ms": 200 / 30,
            "verify_ms": 1200 / 30,
            "walk_ms": 400 / 30,
            "rest_ms": 200 / 30,
            "prefill_ms": 300.0,
            "unaccounted": 0.2,
            "identical_to_ar": 0.5,
            "looping": 0.5,
        }
    )


def test_micro_and_macro_speedup_differ_when_prompts_do() -> None:
    plain = [result(10, 10, 0, 1.0, group=0), result(90, 90, 0, 9.0, group=1, id="b")]
    ours = [result(10, 5, 5, 0.25, group=0), result(90, 90, 0, 9.0, group=1, id="b")]
    assert metrics.speedup_macro(ours, plain) == pytest.approx((4 + 1) / 2)
    assert metrics.speedup_micro(ours, plain) == pytest.approx(10 / 9.25)


def test_rounds_and_turns_are_no_more_prompts() -> None:
    """What is run three times, or is a later turn of the same row, narrows no interval."""

    def of(seconds: Sequence[float]) -> list[Result]:
        return [result(seconds=s, group=i, id=f"row{i}") for i, s in enumerate(seconds)]

    plain, ours = of([1.0, 2.0, 3.0, 4.0]), of([0.5, 0.9, 2.0, 1.1])
    once = metrics.measure(ours, plain)
    rounds = [[replace(r, group=r.group + 4 * n) for n in range(3) for r in side] for side in (ours, plain)]
    again = metrics.measure(*rounds)
    for name in ("speedup_micro", "speedup_macro", "speedup_median", "speedup_low", "speedup_high"):
        assert again[name] == pytest.approx(once[name]), name
    assert again["num_prompts"] == 4
    turns = [
        [replace(r, key=r.key._replace(id=f"row{r.group // 2}#{r.group % 2 + 1}")) for r in s] for s in (ours, plain)
    ]
    row1, row2 = (3.0 / 1.4, 7.0 / 3.1)
    assert metrics.measure(*turns)["speedup_macro"] == pytest.approx((row1 + row2) / 2)


def test_a_batch_takes_as_long_as_its_longest_request() -> None:
    batch = [result(10, 10, 0, 1.0), result(20, 20, 0, 3.0), result(5, 5, 0, 0.5)]
    assert metrics.tokens_per_second(batch) == pytest.approx(35 / 3)
    assert metrics.milliseconds(batch)["cycle_ms"] == pytest.approx(3000 / 20)


def test_answers_of_one_token_measure_nothing() -> None:
    row = metrics.measure([result(0, 0, 0, 0.0)], [result(0, 0, 0, 0.0)])
    for name in ("acceptance_length", "tokens_per_second", "speedup_micro", "speedup_macro", "cycle_ms"):
        assert row[name] is None
    assert row["identical_to_ar"] == 1


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ((), False),
        ((1, 1, 1), False),
        ((1,) * 6, True),  # 3 4-grams, 2 of them repeated
        ((1,) * 5, False),  # 1 of 2 is half, not over half
        (tuple(range(8)) + tuple(range(8)), False),  # 13 4-grams, 5 repeated
        (tuple(range(8)) * 3, True),  # 21 4-grams, 13 repeated
    ],
)
def test_looping(ids, loops) -> None:
    assert metrics.is_looping(ids) is loops


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=8))
def test_acceptance_length_is_weighted_by_cycles(traces) -> None:
    results = [result(cycles=c, accepted=c * a) for c, a in traces]
    expected = sum(c * (a + 1) for c, a in traces) / sum(c for c, _ in traces)
    assert metrics.acceptance_length(results) == pytest.approx(expected)


# ---- plan


def test_plain_decoding_comes_first_and_each_method_runs_once_per_tree() -> None:
    trees = [TreeConfig(budget=8), TreeConfig(budget=16)]
    methods = line_up(["pr", "ar", "pr", "pr:budget=4,m=0", "ngram"], trees)
    assert [(m.typed, shape(m)["budget"]) for m in methods] == [
        ("ar", 0), ("pr", 8), ("pr", 16), ("pr:budget=4,m=0", 4), ("ngram", 8), ("ngram", 16),
    ]  # fmt: skip
    assert shape(methods[0]) == dict.fromkeys(shape(methods[0]), 0)
    assert shape(methods[4]) == {"budget": 8, "grow_width": 0, "offer_width": 0, "num_steps": 8, "num_reconsider": 0}


def test_groups_stay_within_a_task() -> None:
    prompts = [Prompt(task, str(i), (1,)) for task in "ab" for i in range(3)]
    groups = make_groups(prompts, 2)
    assert [(g.number, [p.task + p.id for p in g.prompts]) for g in groups] == [
        (0, ["a0", "a1"]), (1, ["a2"]), (2, ["b0", "b1"]), (3, ["b2"]),
    ]  # fmt: skip


def test_a_prompts_seed_depends_on_its_id_and_the_runs_seed() -> None:
    assert prompt_seed(0, "a") == prompt_seed(0, "a")
    assert len({prompt_seed(seed, id) for seed in range(5) for id in "abcde"}) == 25
    assert all(0 <= prompt_seed(0, str(i)) < 2**63 for i in range(100))


# ---- runs


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", 3, torch.float32, vocab_size=12)


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(tiny_drafter(target), folder, {}, torch.float32)
    return folder


def make(target, methods, trees=(SMALL,), *, drafter=None, batch_size=1, temperatures=(0.0,), prompts=2) -> Bench:
    drafters = {m: drafter if m.has_drafter else None for m in line_up(methods, list(trees))}
    llms = {
        m: LLM(target, given, method=m.typed, tree=m.tree, max_batch_size=batch_size, max_model_len=64)
        for m, given in drafters.items()
    }
    tokens = [Prompt(task, f"{task}{i}", (1, 2, 3, i)) for task in ("x", "y") for i in range(prompts)]
    return Bench(llms, make_groups(tokens, batch_size), batch_size, temperatures, 16, 0)


def finish(bench: Bench, folder: Path) -> Findings:
    store = Store(folder, {"seed": bench.seed}, "r1")
    run(bench, store, lambda result: None)
    return Findings(bench, store.results, audit_all(bench, store.results))


TIMES = ("_ms", "tokens_per_second", "speedup", "memory", "unaccounted")


def untimed(rows):
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMES)} for row in rows]


def test_rows_of_a_lossless_run(target, drafter: Path, tmp_path: Path) -> None:
    bench = make(target, ["ngram", "eagle3.1", "pr"], drafter=drafter, temperatures=(0.0, 1.0))
    rows = finish(bench, tmp_path).rows()
    assert len(rows) == 2 * 2 * 4
    assert all(row["identical_to_ar"] == 1 and row["num_excused"] == 0 for row in rows)
    ar, pr = rows[0], rows[3]
    assert (ar["method"], ar["budget"], ar["speedup_vs_ar"], ar["acceptance_length"]) == ("ar", 0, 1, 1)
    assert (pr["method"], pr["task"], pr["budget"], pr["num_reconsider"], pr["batch_size"]) == ("pr", "x", 6, 3, 1)
    assert pr["acceptance_length"] > 1
    parts = sum(pr[name] for name in ("draft_ms", "verify_ms", "walk_ms", "rest_ms"))
    assert parts == pytest.approx(pr["cycle_ms"])
    assert pr["speedup_vs_ar"] == pytest.approx(pr["tokens_per_second"] / ar["tokens_per_second"])


def test_a_planted_slow_down_is_visible(target, drafter: Path, tmp_path: Path) -> None:
    """Of two methods with the same tree, one drafts 10 ms longer: seen in its part of the cycle and in the speedup."""
    bench = make(target, ["eagle3.1", "pr:m=0"], drafter=drafter, prompts=4)
    slow = next(llm for method, llm in bench.llms.items() if method.typed == "pr:m=0")
    draft = slow.engine.speculator.draft

    def draft_late(roots):
        time.sleep(0.01)
        return draft(roots)

    slow.engine.speculator.draft = draft_late  # type: ignore[method-assign]
    _, plain, late = finish(bench, tmp_path).totals()
    assert late["acceptance_length"] == plain["acceptance_length"]
    assert late["draft_ms"] - plain["draft_ms"] > 9  # more on a busy machine
    assert abs(late["verify_ms"] - plain["verify_ms"]) < late["draft_ms"] - plain["draft_ms"]
    assert late["speedup_vs_ar"] < plain["speedup_vs_ar"]


def test_wall_time_is_the_sum_of_its_parts(target, tmp_path: Path) -> None:
    bench = make(target, ["ngram"], prompts=4)
    rows = finish(bench, tmp_path).totals()
    assert all(0 <= row["unaccounted"] < 1 for row in rows)  # tiny cycles: the calls themselves cost much
    llm = bench.llms[next(iter(bench.llms))]
    generate = llm.generate

    def generate_late(prompts, params):
        time.sleep(1)
        return generate(prompts, params)

    llm.generate = generate_late  # type: ignore[method-assign]
    late, ngram = finish(bench, tmp_path / "late").totals()
    assert late["unaccounted"] > ngram["unaccounted"] + 0.1


def test_batches_give_the_same_texts_as_single_prompts(target, drafter: Path, tmp_path: Path) -> None:
    single, batch = (
        finish(make(target, ["pr"], drafter=drafter, batch_size=n, temperatures=(1.0,)), tmp_path / str(n))
        for n in (1, 2)
    )
    assert {k: r.token_ids for k, r in single.results.items()} == {k: r.token_ids for k, r in batch.results.items()}
    assert {r.group for r in batch.results.values()} == {0, 1}


def test_totals_are_over_all_tasks(target, tmp_path: Path) -> None:
    findings = finish(make(target, ["ngram"]), tmp_path)
    rows, (ar, ngram) = findings.rows(), findings.totals()
    assert (ar["task"], ar["num_prompts"]) == ("all tasks", 4)
    assert ngram["num_cycles"] == sum(row["num_cycles"] for row in rows if row["method"] == "ngram")
    assert markdown([ngram]).count("\n|") == 3


def test_methods_take_turns_within_a_prompt_and_nobody_always_follows_the_same(target) -> None:
    bench = replace(make(target, ["ngram"], [SMALL, TreeConfig(budget=3)]), num_rounds=2)
    order = [(g.number, n, method.typed, shape(method)["budget"]) for g, method, _, n in turns(bench)]
    assert order == [(g.number, n, method.typed, shape(method)["budget"]) for g, method, _, n in turns(bench)]
    by_turn = [order[i : i + 3] for i in range(0, len(order), 3)]
    methods = [("ar", 0), ("ngram", 3), ("ngram", 6)]
    assert [{turn[:2] for turn in three} for three in by_turn] == [{(g, n)} for n in range(2) for g in range(4)]
    orders = [[turn[2:] for turn in three] for three in by_turn]
    assert all(sorted(three) == methods for three in orders)
    assert orders[4:] == [three[::-1] for three in orders[:4]]
    assert len({tuple(three) for three in orders[:4]}) > 1


def test_an_interrupted_run_goes_on_and_gives_the_same_rows(target, tmp_path: Path) -> None:
    whole = finish(make(target, ["ngram"], temperatures=(1.0,)), tmp_path / "whole")

    def interrupt(result: Result) -> None:
        if len(store.results) == 5:
            raise KeyboardInterrupt

    bench = make(target, ["ngram"], temperatures=(1.0,))
    store = Store(tmp_path / "part", {"seed": 0}, "r1")
    with pytest.raises(KeyboardInterrupt):
        run(bench, store, interrupt)
    file = tmp_path / "part" / "requests.jsonl"
    before = file.read_text()
    assert before.count("\n") == 5
    file.write_text(before + before[:70])  # killed in the middle of a line
    again = finish(bench, tmp_path / "part")
    assert file.read_text().startswith(before)
    assert file.read_text().count("\n") == bench.num_results
    assert untimed(again.rows()) == untimed(whole.rows())


def test_a_finished_run_is_only_reported(target, tmp_path: Path) -> None:
    first = finish(make(target, ["ngram"]), tmp_path)
    bench = make(target, ["ngram"])
    for llm in bench.llms.values():
        llm.engine = None  # type: ignore[assignment]  # nothing may be decoded
    assert finish(bench, tmp_path).rows() == first.rows()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Store(tmp_path, {"seed": 0, "limit": 3, "budgets": (8,)}, "r1")
    Store(tmp_path, {"seed": 0, "limit": 3, "budgets": (8,)}, "r2")
    with pytest.raises(UserError, match=r"other settings \(seed, budgets\): give another --out"):
        Store(tmp_path, {"seed": 1, "limit": 3, "budgets": (8, 16)}, "r1")


@pytest.mark.parametrize(
    ("file", "text"),
    [("settings.json", ""), ("settings.json", "null"), ("requests.jsonl", "{}\n"), ("requests.jsonl", "null\n")],
)
def test_a_damaged_run_folder_is_told_of_and_left_alone(file: str, text: str, tmp_path: Path) -> None:
    Store(tmp_path, {"seed": 0}, "r1")
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=f"{file}.* is damaged"):
        Store(tmp_path, {"seed": 0}, "r1")
    assert (tmp_path / file).read_text() == text


def test_cutting_off_half_a_line_writes_nothing_else(target, tmp_path: Path, monkeypatch) -> None:
    finish(make(target, ["ngram"]), tmp_path)
    file = tmp_path / "requests.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"half')
    monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("a full disk would lose all results"))
    Store(tmp_path, {"seed": 0}, "r1")
    assert file.read_bytes() == whole


# ---- audit


class Altered:
    """A target whose logits are changed by a function of the logits and the number of rows."""

    def __init__(self, target, change) -> None:
        self.target, self.change, self.spec = target, change, target.spec

    def forward(self, rows, cache, last_only=False):
        out = self.target.forward(rows, cache, last_only)
        if not last_only:
            self.change(out.logits_RNV)
        return out


def second_at(offset: float):
    """Set the second best logit to the best one plus ``offset``."""

    def change(logits_RNV) -> None:
        best_RN2 = logits_RNV.topk(2, dim=-1)
        logits_RNV.scatter_(2, best_RN2.indices[..., 1:], best_RN2.values[..., :1] + offset)

    return change


def altered(bench: Bench, plain, other) -> Bench:
    for llm, change in zip(bench.llms.values(), (plain, other), strict=True):
        llm.engine.target = Altered(llm.target, change)  # type: ignore[assignment]
    return bench


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lossy_verifier_is_caught_and_not_excused(target, tmp_path: Path, temperature: float) -> None:
    def wrong_below_the_root(logits_RNV) -> None:
        logits_RNV[:, 1:] = logits_RNV[:, 1:].roll(1, dims=-1)

    bench = altered(make(target, ["ngram"], temperatures=(temperature,)), lambda logits: None, wrong_below_the_root)
    findings = finish(bench, tmp_path)
    ngram = findings.totals()[1]
    assert ngram["identical_to_ar"] < 1
    assert ngram["num_excused"] == 0
    assert len(findings.complaints()) == round((1 - ngram["identical_to_ar"]) * 4)


def test_near_ties_that_rounding_turns_are_excused(target, tmp_path: Path) -> None:
    bench = altered(make(target, ["ngram"]), second_at(-2e-6), second_at(2e-6))
    findings = finish(bench, tmp_path)
    ngram = findings.totals()[1]
    assert ngram["identical_to_ar"] < 1
    assert ngram["num_excused"] == len(findings.audits) > 0
    assert findings.complaints() == [
        f"{len(findings.audits)} of 4 texts of ngram (budget 6, T = 0) differ by rounding, over 0.5% of them"
    ]
    assert f", {ngram['num_excused']} excused |" in markdown([ngram])
    assert all(a.gap and a.difference and a.gap <= 2 * a.difference < 1e-4 for a in findings.audits.values())


def test_a_wrong_token_among_rounded_scores_is_not_excused(target) -> None:
    bench = altered(make(target, ["ngram"]), lambda logits: None, lambda logits: logits.add_(1e-6))
    plain, other = bench.llms.values()
    job = Job([(1, 2, 3)], [SamplingParams(max_tokens=12, seed=1, ignore_eos=True)])
    (output,) = plain.generate(job.prompts, job.params)
    for position in (3, 7):
        tampered = list(output.token_ids)
        tampered[position] = (tampered[position] + 1) % 12
        verdict = audit((plain, other), job, 0, (output.token_ids, tampered))
        assert verdict.position == position
        assert verdict.gap
        assert verdict.difference
        assert verdict.gap > 100 * verdict.difference
        assert not verdict.excused


def test_a_text_that_goes_on_after_the_other_ended_is_not_excused(target) -> None:
    plain, other = make(target, ["ngram"]).llms.values()
    verdict = audit((plain, other), Job([(1,)], [SamplingParams(seed=1)]), 0, ((5, 6), (5, 6, 7)))
    assert (verdict.position, verdict.gap, verdict.excused) == (2, None, False)


def choice(token: int, *scores: float) -> Choice:
    scores_V = torch.tensor(scores)
    return Choice(token, scores_V, scores_V)


@pytest.mark.parametrize(
    ("plain", "other", "excused"),
    [
        (choice(0, 5.0, 5.0 - 1e-6, 0.0), choice(1, 5.0, 5.0 + 1e-6, 0.0), True),
        (choice(0, 5.0, 4.0, 0.0), choice(1, 5.0, 4.0 + 1e-6, 0.0), False),  # far from a tie
        (choice(0, 5.0, 5.0 - 1e-6, 0.0), choice(2, 5.0, 5.0 + 1e-6, 0.0), False),  # a tie, but between other tokens
        (choice(0, 5.0, 4.0, 0.0), choice(1, 4.0, 5.0, 0.0), False),  # too far apart to be rounding
        (choice(0, 5.0, 5.0, 0.0), choice(1, 5.0, 5.0, 0.0), False),  # same scores: there is nothing to excuse
    ],
)
def test_judgement(plain, other, excused) -> None:
    assert judge(0, plain, other).excused is excused


def test_first_difference() -> None:
    assert first_difference((1, 2, 3), (1, 2, 4)) == 2
    assert first_difference((1, 2), (1, 2, 4)) == 2
    assert first_difference((), (1,)) == 0


# ---- the command


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs ``secondguess bench`` on a tiny target with a task of three prompts, in an empty folder."""
    target = tiny_target("llama", 1, torch.float32, vocab_size=256)
    target.tokenizer = byte_tokenizer()
    monkeypatch.setattr("secondguess.commands.compare.load", lambda *_: target)
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(i), "benchmark": "own", "turns": [f"prompt {i}"], "reference": None} for i in range(3)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda *more: main(["bench", "tiny", "--tasks", "own.jsonl", "--max-new-tokens", "8", *more])


def test_the_command_writes_tables_rows_and_a_run_folder(command, tmp_path: Path, capsys) -> None:
    flags = ("--method", "ngram", "--budget", "2,4", "--temperature", "0,1", "--limit", "2")
    assert command(*flags, "--json", "rows.json") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads((tmp_path / "rows.json").read_text())
    assert set(summary["record"]) == {"command", "revision", "versions", "machine", "time"}
    assert [(r["method"], r["budget"], r["temperature"]) for r in summary["rows"]] == [
        (method, budget, t) for t in (0.0, 1.0) for method, budget in (("ar", 0), ("ngram", 2), ("ngram", 4))
    ]
    assert all(row["num_prompts"] == 2 and row["task"] == "own" for row in summary["rows"])
    assert len((folder / "requests.jsonl").read_text().splitlines()) == 12
    assert "**own, T = 1, 2 prompts" in (folder / "table.md").read_text()
    out, err = capsys.readouterr()
    assert "own, T = 0, 2 prompts" in out
    assert "decode tokens" in err


def test_a_second_call_continues_the_run_folder_and_refuses_other_settings(command, capsys) -> None:
    assert command("--method", "ngram", "--out", "r") == 0
    lines = Path("r/requests.jsonl").read_text()
    assert command("--method", "ngram", "--out", "r") == 0
    assert Path("r/requests.jsonl").read_text() == lines
    capsys.readouterr()
    assert command("--method", "ngram", "--out", "r", "--seed", "1") == 2
    assert "r holds a run with other settings (seed): give another --out" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(command, monkeypatch, capsys) -> None:
    add = Store.add

    def add_two(self: Store, results) -> None:
        add(self, results)
        if len(self.results) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", add_two)
        assert command("--method", "ngram", "--out", "r") == 130
    assert "go on with the same command and --out r\n" in capsys.readouterr().err
    assert command("--method", "ngram", "--out", "r") == 0
    assert len(Path("r/requests.jsonl").read_text().splitlines()) == 6


def test_a_lossy_method_is_named_and_the_exit_code_is_1(command, monkeypatch, capsys) -> None:
    walking = sys.modules["secondguess.tree.walk"]  # by name, secondguess.tree.walk is the function
    monkeypatch.setattr(walking, "child_with", lambda tree, node_R, token_R: lossy(tree, node_R))
    assert command("--method", "ngram", "--budget", "4", "--max-new-tokens", "30", "--limit", "1") == 1
    assert "NOT LOSSLESS: ngram (budget 4, T = 0) on own 0" in capsys.readouterr().err


def lossy(tree, node_R):
    """Whatever the target chose, the walk goes to the first child, and once."""
    has_child = tree.valid_RN.shape[1] > 1 and bool(tree.valid_RN[0, 1])
    return torch.ones_like(node_R) if has_child and int(node_R[0]) == 0 else -torch.ones_like(node_R)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method", "prr"], "unknown method 'prr'; did you mean pr?"),
        (["--method", "pr:q=1"], "unknown setting 'q'"),
        (["--method", "ngram:k=3"], "ngram does not use offer_width, only eagle3.1, pr, hass, hass+pr do"),
        (["--budget", "0"], "budget must be at least 1, got 0"),
        (["--budget", "many"], "invalid comma-separated int or auto value: 'many'"),
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "max_tokens must be at least 1"),
        (["--tasks", "broken.jsonl"], "broken.jsonl:1: "),
        (["--tasks", "gsm9k"], "did you mean gsm8k?"),
        (["--tasks", "long.jsonl", "--method", "ar"], "task long, row 0: "),
        (["--drafter", "nowhere"], "no drafter 'nowhere'"),
        (["--method", "ngram", "--grow-width", "4"], "--grow-width needs one of the methods eagle3.1, pr"),
        (["--method", "ngram", "--out", "long.jsonl/run"], "long.jsonl/run cannot be a folder: "),
        (["--budgett", "3"], "unknown flag --budgett; did you mean --budget?"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags, said, command, capsys) -> None:
    Path("broken.jsonl").write_text('{"id": 1}\n')
    Path("long.jsonl").write_text(json.dumps({"id": "0", "turns": ["x" * 2000]}) + "\n")
    assert command(*flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("secondguess: ")
    assert err.count("\n") == 1
    assert said in err
    assert not Path("runs").exists()


def test_two_prompts_of_one_name_are_refused(command, capsys) -> None:
    Path("own.jsonl").write_text('{"id": "q", "turns": ["Say hi", "Again"]}\n{"id": "q#2", "turns": ["Count"]}\n')
    assert command("--method", "ngram") == 2
    assert "row 'q#2' has the name of another row's later turn" in capsys.readouterr().err


def test_files_of_others_in_the_run_folder_stay(command) -> None:
    Path("r/sub").mkdir(parents=True)
    Path("r/sub/.movie.partial").write_text("precious")
    assert command("--method", "ngram", "--out", "r") == 0
    assert Path("r/sub/.movie.partial").read_text() == "precious"
    assert command("--method", "ngram", "--out", "r", "--json", "r/requests.jsonl") == 2
    assert Path("r/requests.jsonl").read_text()


@pytest.mark.parametrize("change", [('"num_cycles": ', '"num_cycles": 1'), ('"token_ids": [', '"token_ids": [1, ')])
def test_an_altered_line_is_known(command, capsys, change: tuple[str, str]) -> None:
    assert command("--method", "ngram", "--out", "r") == 0
    file = Path("r/requests.jsonl")
    file.write_text(file.read_text().replace(*change, 1))
    assert command("--method", "ngram", "--out", "r") == 2
    assert "r/requests.jsonl:1 is damaged" in capsys.readouterr().err
