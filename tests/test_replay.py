"""Replay: cycle by cycle what live decoding does; transcripts that are damaged or of other things are made anew."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from secondguess.bench import evaluation
from secondguess.bench.acceptance import Tally, acceptance_length, by_depth, count, measure, paired_gain
from secondguess.bench.plan import Prompt, prompt_seed
from secondguess.bench.replay import read, replay
from secondguess.bench.transcript import BEYOND, Transcript, TranscriptStore, key_of, record
from secondguess.cli import main
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import save_drafter
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.speculate import Draw
from secondguess.llm import LLM
from secondguess.methods import make_speculator, parse_method
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree.trim import PADDING
from secondguess.types import DraftTree, SamplingParams, Verdict
from tiny_folder import tiny_workload

TREE = TreeConfig(budget=10, num_steps=4, grow_width=3, offer_width=3)
PROMPTS = [Prompt("t", str(i), tuple((5 * i + 3 * j) % 63 + 1 for j in range(1 + i % 7))) for i in range(20)]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    for name in ("eagle3.1", "pr"):
        save_drafter(tiny_drafter(target, reconsideration=name == "pr"), folder / name, {"target": "tiny"})
    return folder


def transcripts(target, folder: Path, params: SamplingParams, prompts=PROMPTS) -> list[Transcript]:
    llm = LLM(target, method="ar", max_batch_size=6, max_model_len=200)
    return record(llm, prompts, params, TranscriptStore(folder, {"temperature": params.temperature}), lambda n: None)


def live_cycles(llm: LLM, prompt: Prompt, params: SamplingParams) -> list[CycleTrace]:
    traces = []
    for _ in llm.stream(prompt.ids, params):
        if llm.last_trace:
            traces.append(llm.last_trace)
    return traces


def assert_same(live: CycleTrace, replayed: CycleTrace, row: int) -> None:
    """The row of a batch: the tree in all its fields, and what was accepted. Padding is not compared."""
    nodes = int(live.tree.valid_RN[0].sum())
    assert int(replayed.tree.valid_RN[row].sum()) == nodes
    for name in PADDING:
        a, b = getattr(live.tree, name)[0, :nodes], getattr(replayed.tree, name)[row, :nodes]
        if name == "scores_RN":
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        else:
            assert torch.equal(a, b), name
    n = int(live.verdict.num_emitted_R[0])
    assert int(replayed.verdict.num_emitted_R[row]) == n
    assert torch.equal(live.verdict.path_RD[0, :n], replayed.verdict.path_RD[row, :n])
    assert torch.equal(live.verdict.tokens_RD[0, :n], replayed.verdict.tokens_RD[row, :n])


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("typed", ["pr", "eagle3.1", "ngram", "pr:coupled=true"])
def test_replay_is_live_decoding_cycle_by_cycle(target, drafters, typed, temperature, tmp_path) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    made = transcripts(target, tmp_path, params)
    assert temperature == 0 or any(t.finish_reason == "stop" for t in made)
    method = parse_method(typed, TREE)
    drafter = drafters / method.name if method.has_drafter else None
    llm = LLM(target, drafter, method=typed, tree=TREE, max_batch_size=1, max_model_len=200)
    live = [
        live_cycles(llm, p, SamplingParams(temperature=temperature, seed=prompt_seed(3, p.id), max_tokens=40))
        for p in PROMPTS
    ]
    replayed: list[list[tuple[CycleTrace, int]]] = [[] for _ in PROMPTS]

    def keep(running, trace: CycleTrace) -> None:
        for r, i in enumerate(running):
            replayed[i].append((trace, r))

    speculator = make_speculator(method, target, drafter, len(PROMPTS), 200)
    texts = [read(target, t, Draw(temperature, prompt_seed(3, t.key.id))) for t in made]
    replay(speculator, texts, keep)
    assert sum(map(len, live)) > 100
    for ours, theirs in zip(live, replayed, strict=True):
        assert len(ours) == len(theirs)
        for trace, (other, row) in zip(ours, theirs, strict=True):
            assert_same(trace, other, row)
    again: Counter[int] = Counter()  # the speculator's slots are free again
    replay(speculator, texts, lambda running, _: again.update(running))
    assert [again[i] for i in range(len(PROMPTS))] == [len(cycles) for cycles in live]


def test_what_comes_after_the_end_is_what_plain_decoding_would_write(target, tmp_path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
    llm = LLM(target, method="ar", max_batch_size=1, max_model_len=200)
    for prompt, text in zip(PROMPTS[:5], transcripts(target, tmp_path, params, PROMPTS[:5]), strict=True):
        longer = SamplingParams(temperature=1.0, seed=prompt_seed(3, prompt.id), max_tokens=60, ignore_eos=True)
        (output,) = llm.generate([prompt.ids], longer)
        known = text.answer_ids + text.beyond_ids
        assert len(text.beyond_ids) == BEYOND
        assert output.token_ids[: len(known)] == known


def test_transcripts_are_made_once_and_again_when_damaged_or_of_another_prompt(target, tmp_path, monkeypatch) -> None:
    params = SamplingParams(seed=3, max_tokens=10)
    made = transcripts(target, tmp_path, params, PROMPTS[:4])
    (file,) = tmp_path.glob("*/texts.jsonl")
    lines = file.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["answer_ids"][0] += 1
    file.write_text("\n".join([lines[0], json.dumps(changed), lines[2], lines[3][:40]]))  # the last cut by a kill
    decoded: list[int] = []
    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda self, p, q: decoded.append(len(p)) or generate(self, p, q))
    assert transcripts(target, tmp_path, params, PROMPTS[:4]) == made
    assert decoded == [2, 2]  # answers, and what comes after them
    assert transcripts(target, tmp_path, params, PROMPTS[:4]) == made
    assert decoded == [2, 2]
    other = Prompt("t", PROMPTS[0].id, (9, 9))
    assert transcripts(target, tmp_path, params, [other])[0].prompt_ids == (9, 9)
    assert len(list(tmp_path.iterdir())) == 1
    transcripts(target, tmp_path, SamplingParams(temperature=1.0, seed=3, max_tokens=10), PROMPTS[:1])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_key_tells_prompts_apart() -> None:
    assert key_of(Prompt("t", "1", (1, 23))) != key_of(Prompt("t", "1", (12, 3)))


def tally(*lengths: int, looping: bool = False) -> Tally:
    return Tally(looping, None, Counter(lengths), [3 * len(lengths), len(lengths)], [sum(lengths), 0])


def test_counts_equal_hand_computed_ones() -> None:
    #        0 (root)
    #      1    2      node 2 is of level 1, node 5 is padding
    #      3    4
    tree = DraftTree(
        tokens_RN=torch.tensor([[9, 1, 2, 3, 4, 0]]),
        parents_RN=torch.tensor([[-1, 0, 0, 1, 2, -1]]),
        depths_RN=torch.tensor([[0, 1, 1, 2, 2, 0]]),
        levels_RN=torch.tensor([[0, 0, 1, 0, 0, 0]]),
        scores_RN=torch.zeros(1, 6),
        valid_RN=torch.tensor([[True] * 5 + [False]]),
    )
    verdict = Verdict(torch.tensor([[0, 2, 4]]), torch.tensor([[2, 4, 7]]), torch.tensor([3]))
    missed = Verdict(torch.tensor([[0]]), torch.tensor([[7]]), torch.tensor([1]))
    tallies = [Tally(False), Tally(False)]
    count(tallies, [1], CycleTrace(tree, verdict))
    count(tallies, [1], CycleTrace(tree, missed))
    assert tallies[0] == Tally(False)
    assert tallies[1] == Tally(False, None, Counter({2: 1, 0: 1}), [6, 2], [1, 1])
    assert tallies[1].num_emitted == 4
    found = measure(tallies, None)
    assert found["repeated_siblings"] == 0
    assert found["acceptance_length"] == 2.0
    assert found["acceptance_by_depth"] == [0.5, 1.0]
    assert found["acceptance_by_level"] == [1 / 6, 1 / 2]
    assert found["refined_drafted"] == 0.25
    assert found["refined_accepted"] == 0.5
    assert found["gain"] is None


def test_a_repeated_sibling_is_counted() -> None:
    """Node 3 repeats node 1; 4 and 5 have different parents, 6 and 7 are padding."""
    tree = DraftTree(
        tokens_RN=torch.tensor([[9, 1, 2, 1, 5, 5, 0, 0]]),
        parents_RN=torch.tensor([[-1, 0, 0, 0, 1, 2, -1, -1]]),
        depths_RN=torch.tensor([[0, 1, 1, 1, 2, 2, 0, 0]]),
        levels_RN=torch.zeros(1, 8, dtype=torch.long),
        scores_RN=torch.zeros(1, 8),
        valid_RN=torch.tensor([[True] * 6 + [False] * 2]),
    )
    (found,) = tallies = [Tally(False)]
    count(tallies, [0], CycleTrace(tree, Verdict(torch.tensor([[0]]), torch.tensor([[7]]), torch.tensor([1]))))
    assert found.repeated == 1
    assert measure(tallies, None)["repeated_siblings"] == 1 / 5


def test_a_planted_duplicate_is_caught(target, drafters, tmp_path) -> None:
    made = transcripts(target, tmp_path, SamplingParams(seed=3, max_tokens=40), PROMPTS[:4])
    shares = {}
    for typed in ("pr", "pr:merge=append"):
        tallies = [Tally(False) for _ in made]
        speculator = make_speculator(parse_method(typed, TREE), target, drafters / "pr", len(made), 200)
        replay(speculator, [read(target, t) for t in made], partial(count, tallies))
        shares[typed] = measure(tallies, None)["repeated_siblings"]
    assert shares["pr"] == 0
    assert shares["pr:merge=append"] > 0.05


def test_depths_and_taus() -> None:
    tallies = [tally(3, 1, 0, 1), tally(0, looping=True), Tally(False)]
    assert by_depth(tallies) == [3 / 5, 1 / 3, 1.0]
    assert acceptance_length(tallies) == 2.0
    found = measure(tallies, None)
    assert found["acceptance_length_nonlooping"] == 9 / 4
    assert found["acceptance_length_mean"] == (9 / 4 + 1) / 2
    assert measure([Tally(False)], None)["acceptance_length"] is None


def test_paired_gain() -> None:
    theirs = [tally(1, 1, 1), tally(3, 3), tally(0, 0, 0, 0)]
    ours = [tally(1, 1, 2), tally(3, 4), tally(0, 0, 0, 1)]
    gain = paired_gain(ours, theirs)
    assert gain is not None
    assert gain[0] == pytest.approx((9 + 12) / 9 / ((9 + 9) / 9) - 1)
    assert 0 < gain[1] < gain[0] < gain[2]
    assert paired_gain(theirs, theirs) == (0.0, 0.0, 0.0)
    assert paired_gain([], []) is None


def test_the_turns_of_a_conversation_are_drawn_together() -> None:
    """Two turns of each of three conversations give the interval of three texts with both turns' cycles."""
    lengths = [((1, 1), (3,)), ((2, 0), (0, 0, 1)), ((4,), (0, 2))]

    def side(more: int) -> tuple[list[Tally], list[Tally]]:
        turns = [
            replace(tally(*(n + more for n in turn)), conversation=str(i))
            for i, talk in enumerate(lengths)
            for turn in talk
        ]
        return turns, [tally(*(n + more for turn in talk for n in turn)) for talk in lengths]

    (ours, ours_whole), (theirs, theirs_whole) = side(1), side(0)
    assert paired_gain(ours, theirs) == paired_gain(ours_whole, theirs_whole)
    alone = paired_gain([replace(t, conversation=None) for t in ours], [replace(t, conversation=None) for t in theirs])
    assert alone is not None
    assert alone != paired_gain(ours, theirs)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command on a tiny target and its drafter, with two tasks of two prompts, in an empty folder."""
    fixed = tiny_workload(tmp_path, monkeypatch)
    return lambda name, *more: main([name, *fixed, *more])


def test_eval_finds_what_bench_finds(command, capsys) -> None:
    flags = ("--method", "ngram,eagle3.1,pr,pr:m=1", "--budget", "3,8", "--temperature", "0,1")
    assert command("bench", *flags, "--json", "bench.json") == 0
    assert command("eval", *flags, "--json", "eval.json", "--against", "eagle3.1", "--group", "both=one,two") == 0
    out = capsys.readouterr().out
    assert "all tasks, T = 1, 4 prompts" in out
    assert "gain in tau over eagle3.1" in out
    live, replayed = (json.loads(Path(f).read_text())["rows"] for f in ("bench.json", "eval.json"))
    found = {(r["method"], r["budget"], r["task"], r["temperature"]): r for r in replayed}
    assert len(found) == len(replayed) == 8 * 4 * 2
    compared = [r for r in live if r["method"] != "ar"]
    assert len(compared) == 8 * 2 * 2
    for row in compared:
        other = found[row["method"], row["budget"], row["task"], row["temperature"]]
        for name in ("num_cycles", "acceptance_length", "acceptance_length_nonlooping", "looping", "num_prompts"):
            assert other[name] == row[name], name
    totals = [r for r in replayed if r["task"] == "all tasks" and r["method"] == "pr"]
    assert all(r["gain_low"] <= r["gain"] <= r["gain_high"] for r in totals)
    assert all(r["gain"] is None for r in replayed if r["method"] == "eagle3.1")
    assert [r for r in replayed if r["task"] == "both"] == [
        r | {"task": "both"} for r in replayed if r["task"] == "all tasks"
    ]
    again, against = evaluation.read(Path("eval.json"))
    assert [row for e in again for row in e.rows(against, {"both": ("one", "two")})] == replayed


def test_a_second_turn_follows_the_plain_answer_to_the_first(command, capsys) -> None:
    Path("talk.jsonl").write_text(json.dumps({"id": "a", "turns": ["one", "two"]}) + "\n")
    assert command("bench", "--method", "ngram", "--tasks", "talk.jsonl", "--out", "run", "--temperature", "0,1") == 0
    lines = [json.loads(line) for line in Path("run/requests.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines} == {"a", "a#2"}
    llm = LLM("target", method="ar")
    first = {"role": "user", "content": "one"}
    (answer,) = llm.generate([[first]], SamplingParams(max_tokens=12))
    talk = [first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "two"}]
    seed = next(line["seed"] for line in lines if line["id"] == "a#2")
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=seed)
        (output,) = llm.generate([talk], params)
        found = [line["token_ids"] for line in lines if (line["id"], line["temperature"]) == ("a#2", temperature)]
        assert found == [list(output.token_ids)] * 2
    assert command("eval", "--method", "ngram", "--tasks", "talk.jsonl") == 0
    assert "talk, T = 0, 2 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method", "ar"], "nothing to replay"),
        (["--method", "pr", "--against", "eagle3.1"], "--against eagle3.1 is none of the methods that draft: pr"),
        (["--method", "pr:gamma=17"], "num_steps must be at most that"),
        (["--method", "pr", "--max-new-tokens", "1020"], "lower --max-new-tokens"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags, said, command, capsys) -> None:
    assert command("eval", *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("secondguess: ")
    assert said in err


def test_a_drafter_that_is_missing_is_found_before_a_text_is_decoded(command, capsys, monkeypatch) -> None:
    monkeypatch.setattr("secondguess.commands.recordings.transcribe", lambda *_: pytest.fail("decoded first"))
    assert command("eval", "--method", "pr,pr:drafter=nowhere") == 2
    assert "no drafter 'nowhere'" in capsys.readouterr().err
