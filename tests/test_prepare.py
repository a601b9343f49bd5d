"""Prepare: prompts in all their forms, overlap with benchmarks, answers that are the target's and never lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from secondguess.bench.tasks import TASKS
from secondguess.cli import main
from secondguess.commands.show_answers import paint
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prepare.answers import AnswerFile, Recipe, longest_prompt
from secondguess.prepare.chat import Chat, chat_of
from secondguess.prepare.compact import Answer, read_answers, write_answers
from secondguess.prepare.overlap import Index, words
from secondguess.prepare.prompts import Conversation, parse, read_conversations
from secondguess.prepare.selection import WINDOW, arrange, length
from secondguess.target.load import load_target
from secondguess.train.data import Response, read_responses
from secondguess.types import SamplingParams
from tiny_folder import byte_tokenizer, save_tiny

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
        (
            {"conversations": [{"role": "user", "content": "Hi"}, {"role": "tool"}, {"role": "user", "content": "!"}]},
            ("Hi", "!"),
            None,
        ),
        (
            {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
            ("Hi",),
            "Be brief.",
        ),
        ({"turns": ["Hi"], "system": "Be brief."}, ("Hi",), "Be brief."),
        ({"conversations": [{"from": "human", "value": "Hi"}], "system": ""}, ("Hi",), ""),
    ],
)
def test_all_forms_of_a_conversation(row, turns, system) -> None:
    found = parse(row, "file")
    assert (found.turns, found.system, found.source) == (turns, system, "file")
    assert found.id == "1" if "id" in row else found.id.startswith("file/")


@pytest.mark.parametrize(
    "row",
    [[], {}, {"turns": []}, {"turns": [" "]}, {"turns": "Hi"}, {"messages": ["Hi"]}, {"messages": []},
     {"messages": [{"role": "assistant", "content": "Ho"}]}, {"messages": [{"role": "user", "content": 3}]},
     {"messages": [{"role": "narrator", "content": "Once."}, {"role": "user", "content": "Hi"}]},
     {"messages": [{"content": "Hi"}]},
     {"messages": [{"role": "system", "content": "A."}, {"role": "developer", "content": "B."},
                   {"role": "user", "content": "Hi"}]},
     {"turns": ["Hi"], "system": 3}, {"turns": ["half \ud83d"]}, {"id": "half \ud83d", "turns": ["Hi"]}],
)  # fmt: skip
def test_what_is_no_conversation(row) -> None:
    with pytest.raises(ValueError, match=r"row|hold|must|surrogates"):
        parse(row, "file")


def test_a_row_may_name_its_source() -> None:
    named, plain = {"turns": ["Hi"], "source": "chats"}, {"turns": ["Hi"]}
    assert parse(named, "file").source == "chats"
    assert parse(named, "file").id == parse(plain, "file").id


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


def test_ids_are_those_of_all_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "turns": ["Hi", "Why?"]}\n{"id": "x#2", "turns": ["Ho"]}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: id 'x#2' was used at .*a\.jsonl:1"):
        read_conversations([path])
    path.write_text('{"id": "x", "turns": ["Hi"]}\n{"id": "y", "turns": ["Hi"]}\n')
    assert [c.id for c in read_conversations([path, path])] == ["x"]


@given(st.lists(st.integers(1, 9), max_size=3 * WINDOW), st.integers(1, 2), st.randoms())
def test_the_order_mixes_files_and_has_like_lengths_side_by_side(lengths, batch_size, random) -> None:
    conversations = [Conversation(f"{i}", "file", ("x" * n,)) for i, n in enumerate(lengths)]
    ordered = arrange(conversations, batch_size)
    mixed = sorted(conversations, key=lambda c: hashlib.sha256(c.id.encode()).digest())
    size = WINDOW * batch_size
    for number, start in enumerate(range(0, len(mixed), size)):
        window = ordered[start : start + size]
        assert set(window) == set(mixed[start : start + size])
        assert [length(c) for c in window] == sorted(map(length, window), reverse=number % 2 == 1)
    random.shuffle(conversations)
    assert arrange(conversations, batch_size) == ordered


def test_the_temperature_is_drawn_by_the_id_alone() -> None:
    few, many = Recipe((0.0, 1.0), 8, 0, 0), Recipe((0.0, 1.0), 64, 5, 0)
    drawn = [few.temperature(f"p{i}") for i in range(400)]
    assert drawn == [many.temperature(f"p{i}") for i in range(400)]
    assert 160 < sum(drawn) < 240
    assert drawn != [Recipe((0.0, 1.0), 8, 0, 1).temperature(f"p{i}") for i in range(400)]


def test_overlap_is_of_thirteen_words_or_of_a_short_text_as_a_whole() -> None:
    index = Index([f"Alpha {THIRTEEN} omega.", "Short and sweet?"])
    assert index.shared(f"zero, {THIRTEEN.upper()}!") == THIRTEEN
    assert index.shared(THIRTEEN.replace("seven", "7")) is None
    assert index.shared("short -- and sweet") == "short and sweet"
    assert index.shared("short and sweet indeed") is None
    assert Index(["?!"]).shared("...") is None


def test_words_of_any_script() -> None:
    assert words("Stra\u00dfe, has_close 12\uff17: \u041f\u0440\u0438\u0432\u0435\u0442!") == [
        "strasse", "has", "close", "127", "\u043f\u0440\u0438\u0432\u0435\u0442",
    ]  # fmt: skip
    assert words("\u4f60\u597d\uff0cABC \u3053\u3093") == ["\u4f60", "\u597d", "abc", "\u3053", "\u3093"]
    assert words("\ud55c\uad6d\uc5b4 \ubb38\uc7a5") == ["\ud55c\uad6d\uc5b4", "\ubb38\uc7a5"]
    text = "".join(chr(0x4E00 + i) for i in range(20))
    assert Index([text]).shared(f"\u3001{text[5:18]}\u3002") == " ".join(text[5:18])
    assert Index([text]).shared(text[5:17]) is None, "twelve are too few"


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SECONDGUESS_DATA", raising=False)
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
        (["--allow-overlap", "--leave-out-overlap"], "--allow-overlap compares nothing"),
        (["--given", "prompts.jsonl"], "prompts.jsonl holds no answers"),
        (["--only-given"], "--only-given needs --given"),
        (["--endpoint", "localhost:8000/v1"], "--endpoint must be a URL like http://localhost:8000/v1, got localhost"),
        (["--endpoint", "http://a/v1", "--dtype", "float32"], "--dtype is for a target that is loaded here"),
        (["--model", "tiny"], "--model is the target's name at an --endpoint"),
        (["--synthesize", "0"], "--synthesize must be at least 1"),
        (["--show", "-1"], "--show must be at least 0"),
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


def test_prompts_are_compared_with_the_tasks_that_are_here(prepare, monkeypatch, capsys) -> None:
    assert prepare() == 0
    assert "prompts are compared with no benchmark: point --data-dir or" in capsys.readouterr().err
    Path("answers.jsonl").unlink()
    Path("bench").mkdir()
    Path("bench", TASKS["mt_bench"].file).write_text('{"id": "t", "turns": ["Question 2."]}\n')
    assert prepare("--data-dir", "bench") == 2
    monkeypatch.setenv("SECONDGUESS_DATA", "bench")
    assert prepare() == 2
    assert "prompt p2 shares 'question 2' with a benchmark" in capsys.readouterr().err.splitlines()[-1]
    assert not Path("answers.jsonl").exists()
    assert prepare("--allow-overlap") == 0
    assert "compared" not in capsys.readouterr().err
    assert "p2" in answers()


def test_the_limit_is_evenly_spaced(prepare) -> None:
    assert prepare("--limit", "3") == 0
    assert {id_ for id_ in answers() if "#" not in id_} == {"p0", "p2", "p4"}


def test_answers_that_come_with_the_prompts_are_not_used(prepare) -> None:
    assert prepare() == 0
    whole = answers()
    Path("answers.jsonl").unlink()
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    for row in rows:
        turns = row.pop("turns")
        row["messages"] = [
            message
            for turn in turns
            for message in ({"role": "user", "content": turn}, {"role": "assistant", "content": "No."})
        ]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare() == 0
    assert answers() == whole


@pytest.mark.parametrize("reused", [[], ["--given", "small.safetensors"]])
def test_an_answer_to_another_prompt_is_noticed(reused, prepare, capsys) -> None:
    assert prepare("--compact", "small.safetensors") == 0
    if reused:
        Path("answers.jsonl").unlink()
    assert prepare(*reused, "--system", "Be brief.") == 2
    assert "tokens, and now it has" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("reused", [[], ["--given", "small.safetensors"]])
def test_an_answer_to_another_prompt_of_the_same_length_is_noticed(reused, prepare, capsys) -> None:
    assert prepare("--compact", "small.safetensors") == 0
    if reused:
        Path("answers.jsonl").unlink()
    before = Path("prompts.jsonl").read_text()
    Path("prompts.jsonl").write_text(before.replace("question 4", "questiom 4"))
    assert prepare(*reused) == 2
    assert "p4 was answered when its prompt had other tokens" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_has_the_answers_of_one_target(prepare, capsys) -> None:
    assert prepare() == 0
    path = Path("answers.made.json")
    made = json.loads(path.read_text())
    assert made["sessions"][0]["seed"] == 0
    path.write_text(json.dumps(made | {"target": "theirs", "fingerprint": "0" * 16}))
    assert prepare() == 2
    assert "answers.jsonl holds answers of another target, theirs" in capsys.readouterr().err.splitlines()[-1]
    path.unlink()  # as beside a file of an earlier version
    assert prepare() == 0
    assert json.loads(path.read_text()) == made


def test_answers_that_were_drawn_otherwise_stay_and_are_told_of(prepare, capsys) -> None:
    assert prepare() == 0
    before = Path("answers.jsonl").read_text()
    assert prepare("--seed", "1") == 0
    assert Path("answers.jsonl").read_text() == before
    assert "9 answers that are there were drawn with seed 0: they stay" in " ".join(capsys.readouterr().err.split())
    assert [session["seed"] for session in json.loads(Path("answers.made.json").read_text())["sessions"]] == [0, 1]


def test_answers_of_several_files_and_no_others(prepare, capsys) -> None:
    assert prepare() == 0
    whole = answers()
    with AnswerFile(Path("answers.jsonl")) as file:
        found = file.answers
    other = Answer("p0", 0.5, None, (7, 7), found["p0"].prompt_len, found["p0"].prompt_digest)
    write_answers(Path("a.safetensors"), [found["p0"], found["p1"]])
    write_answers(Path("b.safetensors"), [other, found["p4"]])
    Path("answers.jsonl").unlink()
    assert prepare("--given", "a.safetensors", "--given", "b.safetensors", "--only-given") == 0
    assert answers() == {id_: whole[id_] for id_ in ("p0", "p1", "p4")}
    assert "6 turns left out: --given has no answer" in " ".join(capsys.readouterr().err.split())


def test_tokens_of_large_vocabularies_are_kept(tmp_path: Path) -> None:
    kept = [Answer("a", 0.0, 1, (5, 70_000, 2**31), 3, "0" * 16), Answer("b", 1.0, None, (6,), None, None)]
    write_answers(tmp_path / "wide.safetensors", kept)
    assert list(read_answers(tmp_path / "wide.safetensors").values()) == kept


def test_compact_answers_without_prompt_lengths_are_still_read(tmp_path: Path) -> None:
    index = json.dumps([["a", 0.0, 1, 2], ["b", 1.0, 2, 1]])
    save_file({"tokens": torch.tensor([5, 6, 7]).to(torch.uint16)}, tmp_path / "old.safetensors", {"answers": index})
    found = read_answers(tmp_path / "old.safetensors")
    assert [(a.tokens, a.prompt_len) for a in found.values()] == [((5, 6), None), ((7,), None)]
    found["a"].check_prompt((1,) * 17)


def test_what_fits_no_more_is_left_out_with_all_that_follows(prepare, capsys) -> None:
    rows = [{"id": "long", "turns": ["x" * 1013, "and?", "so?"]}, {"id": "fits", "turns": ["y" * 1011]}]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare() == 0
    assert set(answers()) == {"fits"}
    left_out = "3 turns left out: no room for an answer of up to 12 in 1024 tokens, the target's limit"
    assert left_out in " ".join(capsys.readouterr().err.split())


def test_the_longest_prompt_has_the_answers_so_far(prepare) -> None:
    chat = chat_of(load_target("target"))
    talk, one = Conversation("a", "file", ("x" * 9, "y" * 7)), Conversation("b", "file", ("z" * 13,), "Be brief.")
    assert longest_prompt(chat, [talk], 12) == 10 + 1 + 12 + 8, "a line end each"
    assert longest_prompt(chat, [talk, one], 12) == 31
    assert longest_prompt(chat, [talk, one], 2) == 10 + 14
    assert longest_prompt(chat, [], 2) == 0


def test_room_is_made_for_the_longest_conversation(prepare, capsys) -> None:
    """As far as the target goes: its context is 4096 tokens here, its tokens are bytes."""
    config = json.loads(Path("target/config.json").read_text())
    Path("target/config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    rows = [{"id": "fits", "turns": ["x" * 3000]}, {"id": "long", "turns": ["y" * 4084]}]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare() == 0
    assert set(answers()) == {"fits"}
    shown = " ".join(capsys.readouterr().err.split())
    assert "1 turns left out: no room for an answer of up to 12 in 4096 tokens" in shown


def test_a_file_is_written_by_one_process(prepare, capsys) -> None:
    with AnswerFile(Path("answers.jsonl")):
        assert prepare() == 2
    assert "another process is writing answers.jsonl" in capsys.readouterr().err
    assert prepare() == 0


@pytest.mark.parametrize("foreign", ['{"id": "x", "turns": ["Hi"]}', "notes", "{\n}", '{"id": 1}\n{"id": "y", "tu'])
def test_a_file_that_is_no_answer_file_stays_as_it_is(foreign, prepare) -> None:
    Path("answers.jsonl").write_text(foreign)
    assert prepare() == 2
    assert Path("answers.jsonl").read_text() == foreign


def test_a_kill_just_before_a_line_end_costs_nothing(prepare) -> None:
    assert prepare() == 0
    whole, text = answers(), Path("answers.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    Path("answers.jsonl").write_text("".join(lines[:4]).rstrip("\n"))
    assert prepare() == 0
    assert Path("answers.jsonl").read_text().startswith("".join(lines[:4]))
    assert answers() == whole


def test_killed_and_run_again_is_the_same_as_never_killed(prepare) -> None:
    rows = [{"id": f"p{i}", "turns": [f"question {i}", "and then?"]} for i in range(20)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    longer, out = ("--max-new-tokens", "32", "--batch-size", "2"), Path("answers.jsonl")
    command = [sys.executable, "-m", "secondguess", "prepare", "target", "prompts.jsonl", "--out", out.name, *longer]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 3 <= out.read_bytes().count(b"\n") < 40
    assert prepare(*longer) == 0
    resumed = answers()
    out.unlink()
    assert prepare(*longer) == 0
    assert answers() == resumed
    assert len(resumed) == 40


def test_what_a_row_trains_is_coloured() -> None:
    chat = Chat(byte_tokenizer(), 64, frozenset({0}))
    ids = chat.tokenizer.encode("ask<end>Hey<end>")
    text = paint(chat, Response("x", tuple(ids), 4))
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert spans == [
        ("ask", "dim"), ("<end>", "dim reverse"), ("H", "yellow"), ("ey", "green"), ("<end>", "green reverse")
    ]  # fmt: skip


def test_rows_are_shown_after_a_run_and_without_one(prepare, capsys) -> None:
    assert prepare() == 0
    shown = capsys.readouterr().out
    assert shown.count("tokens of prompt") == 1
    assert main(["prepare", "target", "--out", "answers.jsonl", "--show", "2"]) == 0
    again = capsys.readouterr().out
    assert again.count("tokens of prompt") == 2
    assert shown.splitlines()[0] == again.splitlines()[0]
    assert main(["prepare", "target", "--out", "prompts.jsonl", "--show", "2"]) == 2
    assert "prompts.jsonl:1: not a response row" in capsys.readouterr().err


def test_the_result_for_machines(prepare) -> None:
    assert prepare() == 0
    lines = Path("answers.jsonl").read_text().splitlines(keepends=True)
    Path("answers.jsonl").write_text("".join(lines[:-2]))
    assert prepare("--json", "result.json") == 0
    content = json.loads(Path("result.json").read_text())
    assert content["record"].keys() == {"command", "revision", "versions", "machine", "time"}
    [result] = content["results"]
    rows = answers().values()
    assert result["num_answers"] == 9
    assert result["turns_of_this_run"] == {"kept": 7, "answered": 2}
    assert result["num_answer_tokens"] == sum(len(row["input_ids"]) - row["prompt_len"] for row in rows)
    assert result["num_ended"] == sum(row["input_ids"][-1] == 0 for row in rows)
    assert sum(result["num_at_temperature"].values()) == 9


PREFIX = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "flags", "said"),
    [
        (PREFIX + "{% if add_generation_prompt %}A:{% endif %}", [], "template mismatch: token 15 is 'A' for a prompt"),
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PREFIX,
         ["--system", "Be brief."], "the chat template refuses a conversation (no system)"),
        (PREFIX, ["--max-new-tokens", "1"], "all-zero mask: none of the 9 answers in answers.jsonl"),
    ],
)  # fmt: skip
def test_rows_that_would_train_the_wrong_tokens_are_an_error(template, flags, said, prepare, capsys) -> None:
    byte_tokenizer(template).save_pretrained("target")
    assert prepare(*flags) == 2
    err = capsys.readouterr().err
    assert said in err.splitlines()[-1]
