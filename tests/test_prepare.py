"""Prepare: prompts in all their forms, overlap with benchmarks, answers that are the target's and never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secondguess.cli import main
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prepare.overlap import Index
from secondguess.prepare.prompts import parse, read_conversations
from secondguess.train.data import read_responses
from secondguess.types import SamplingParams
from tiny_folder import save_tiny

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    ("row", "turns", "system"),
    [
        ({"id": 1, "turns": ["Hi", "Why?"]}, ("Hi", "Why?"), None),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, ("Hi",), None),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
            ("Hi",),
            "Be brief.",
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, ("Hi",), None),
    ],
)
def test_all_forms_of_a_conversation(row, turns, system) -> None:
    found = parse(row, "file")
    assert (found.turns, found.system, found.source) == (turns, system, "file")
    assert found.id == "1" if "id" in row else found.id.startswith("file/")


@pytest.mark.parametrize(
    "row",
    [[], {}, {"turns": []}, {"turns": [" "]}, {"turns": "Hi"}, {"messages": ["Hi"]}, {"messages": []},
     {"messages": [{"role": "assistant", "content": "Ho"}]}, {"messages": [{"role": "user", "content": 3}]}],
)  # fmt: skip
def test_what_is_no_conversation(row) -> None:
    with pytest.raises(ValueError, match=r"row|hold|must"):
        parse(row, "file")


def test_files_are_joined_and_doublets_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x", "turns": ["Hi"]}\n\n{"id": "y", "turns": ["Hi"]}\n')
    (tmp_path / "b.txt").write_text("Hi\nHo there\n")
    found = read_conversations([tmp_path / "a.jsonl", tmp_path / "b.txt"])
    assert [(c.source, c.turns) for c in found] == [("a", ("Hi",)), ("b", ("Ho there",))]
    (tmp_path / "c.jsonl").write_text('{"id": "x", "turns": ["Other"]}\n')
    with pytest.raises(UserError, match=r"c\.jsonl:1: id 'x' was used at .*a\.jsonl:1"):
        read_conversations([tmp_path / "a.jsonl", tmp_path / "c.jsonl"])
    (tmp_path / "d.jsonl").write_text('{"turns": ["Hi"]}\n{oops\n')
    with pytest.raises(UserError, match=r"d\.jsonl:2: "):
        read_conversations([tmp_path / "d.jsonl"])


def test_overlap_is_of_thirteen_words_or_of_a_short_text_as_a_whole() -> None:
    index = Index([f"Alpha {THIRTEEN} omega.", "Short and sweet?"])
    assert index.shared(f"zero, {THIRTEEN.upper()}!") == THIRTEEN
    assert index.shared(THIRTEEN.replace("seven", "7")) is None
    assert index.shared("short -- and sweet") == "short and sweet"
    assert index.shared("short and sweet indeed") is None


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"p{i}", "turns": [f"question {i}", "and then?"][: 1 + i % 2]} for i in range(6)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = ("--out", "answers.jsonl", "--max-new-tokens", "12", "--batch-size", "3")
    return lambda *more: main(["prepare", "target", "prompts.jsonl", *fixed, *more])


def answers() -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, Path("answers.jsonl").read_text().splitlines())}


def test_answers_are_the_targets_own(prepare) -> None:
    assert prepare() == 0
    found = answers()
    assert set(found) == {f"p{i}" for i in range(6)} | {"p1#2", "p3#2", "p5#2"}
    assert {row["temperature"] for row in found.values()} == {0, 1}
    assert found["p1"]["temperature"] == found["p1#2"]["temperature"]
    llm = LLM("target", method="ar")
    for row in found.values():
        prompt = row["input_ids"][: row["prompt_len"]]
        params = SamplingParams(temperature=row["temperature"], seed=row["seed"], max_tokens=12)
        (output,) = llm.generate([prompt], params)
        assert list(output.token_ids) == row["input_ids"][row["prompt_len"] :]
    text = llm.target.tokenizer.decode(found["p1"]["input_ids"][found["p1"]["prompt_len"] :], skip_special_tokens=True)
    talk = [
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and then?"},
    ]
    assert list(llm.encode(talk)) == found["p1#2"]["input_ids"][: found["p1#2"]["prompt_len"]]
    assert len(read_responses(Path("answers.jsonl"), 257)) > 3


def test_a_killed_run_goes_on_where_it_was(prepare, monkeypatch) -> None:
    assert prepare() == 0
    whole, text = answers(), Path("answers.jsonl").read_text()
    lines = [line + "\n" for line in text.splitlines() if json.loads(line)["id"] not in ("p2", "p3#2")]
    Path("answers.jsonl").write_text("".join(lines) + '{"id": "p2", "inp')
    asked = []
    agenerate = LLM.agenerate
    monkeypatch.setattr(LLM, "agenerate", lambda self, ids, p: asked.append(len(ids)) or agenerate(self, ids, p))
    assert prepare() == 0
    assert len(asked) == 2
    assert answers() == whole
    assert Path("answers.jsonl").read_text().startswith("".join(lines))


def test_compact_answers_give_the_same_file_without_the_target_writing(prepare, monkeypatch) -> None:
    assert prepare("--compact", "small.safetensors") == 0
    whole = answers()
    Path("answers.jsonl").unlink()
    monkeypatch.setattr(LLM, "agenerate", lambda *_: pytest.fail("nothing is left to be decoded"))
    assert prepare("--given", "small.safetensors") == 0
    assert answers() == whole


def test_a_system_prompt_is_for_those_without(prepare) -> None:
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    Path("prompts.jsonl").write_text(json.dumps({"id": "a", "messages": messages}) + '\n{"id": "b", "turns": ["hi"]}\n')
    assert prepare("--system", "given") == 0
    llm = LLM("target", method="ar")
    for id_, system in (("a", "own"), ("b", "given")):
        row = answers()[id_]
        expected = llm.encode([{"role": "system", "content": system}, {"role": "user", "content": "hi"}])
        assert row["input_ids"][: row["prompt_len"]] == list(expected)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--limit", "0"], "--limit must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--out", "prompts.jsonl/a"], "prompts.jsonl cannot be a folder"),
        (["--out", "target/config.json"], "is no answer row"),
        (
            ["--refuse-overlap", "task.jsonl"],
            "prompt p2 shares 'question 2' with a benchmark: give --leave-out-overlap",
        ),
        (["--refuse-overlap", "gsm9k"], "did you mean gsm8k?"),
        (["--given", "prompts.jsonl"], "prompts.jsonl holds no answers"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags, said, prepare, capsys) -> None:
    Path("task.jsonl").write_text('{"id": "t", "turns": ["Question 2."]}\n')
    assert prepare(*flags) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("secondguess: ")
    assert said in err
    assert not Path("answers.jsonl").exists()


def test_overlap_may_be_left_out(prepare) -> None:
    Path("task.jsonl").write_text('{"id": "t", "turns": ["Question 2."]}\n')
    assert prepare("--refuse-overlap", "task.jsonl", "--leave-out-overlap") == 0
    assert {id_ for id_ in answers() if "#" not in id_} == {"p0", "p1", "p3", "p4", "p5"}


def test_the_limit_is_evenly_spaced(prepare) -> None:
    assert prepare("--limit", "3") == 0
    assert {id_ for id_ in answers() if "#" not in id_} == {"p0", "p2", "p4"}
