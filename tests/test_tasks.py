"""Task files: names, paths, subsets, and one clear line for what is broken."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secondguess.bench.hub import convert
from secondguess.bench.tasks import DATA_VARIABLE, FOLDER, ORDER, TASKS, TaskPrompt, evenly_spaced, load_tasks
from secondguess.errors import UserError


def row(id: str, *turns: str, benchmark: str = "own") -> str:
    return json.dumps({"id": id, "benchmark": benchmark, "turns": turns, "reference": None}, ensure_ascii=False)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_path_is_a_task_named_by_its_stem(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", row("a", "Hello?", "And then?"), "", row("b", "line\N{LINE SEPARATOR}two"))
    assert load_tasks([str(path)]) == [
        TaskPrompt("mine", "a", ("Hello?", "And then?")),
        TaskPrompt("mine", "b", ("line\N{LINE SEPARATOR}two",)),
    ]


def test_names_resolve_to_the_data_folder_and_the_flag_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("env", "flag"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "gsm8k_test.jsonl", row(folder, "How many?"))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "env"))
    assert load_tasks(["gsm8k"]) == [TaskPrompt("gsm8k", "env", ("How many?",))]
    assert load_tasks(["gsm8k"], tmp_path / "flag") == [TaskPrompt("gsm8k", "flag", ("How many?",))]


def test_a_name_without_data_says_both_ways_to_give_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match=r"--data-dir or SECONDGUESS_DATA at a folder with mt_bench\.jsonl"):
            load_tasks(["mt_bench"], folder)


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no task 'gsm8'.*did you mean gsm8k"):
        load_tasks(["gsm8"], tmp_path)


def test_humaneval_is_wrapped_for_chat(tmp_path: Path) -> None:
    path = write(tmp_path / "h.jsonl", row("0", 'def f(d={}):\n    """Say {hi}."""\n', benchmark="humaneval"))
    (prompt,) = load_tasks([str(path)])
    assert prompt.turns[0].endswith('\n\n```python\ndef f(d={}):\n    """Say {hi}."""\n```')
    assert "Python function" in prompt.turns[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "Expecting property name"),
        ("[1]", "a row must be an object"),
        ('{"turns": ["x"]}', '"id" must be text'),
        ('{"id": "a"}', '"turns" must be a list'),
        ('{"id": "a", "turns": []}', '"turns" must be a list'),
        ('{"id": "a", "turns": [" "]}', '"turns" must be a list'),
        ('{"id": "a", "turns": "x"}', '"turns" must be a list'),
        ('{"id": "first", "turns": ["x"]}', "id 'first' was used by an earlier row"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(line: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row("first", "x"), line)
    with pytest.raises(UserError) as error:
        load_tasks([str(path)])
    assert str(error.value).startswith(f"{path}:2: ")
    assert said in str(error.value)


def test_random_bytes_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"id": "\xff\xfe"}')
    with pytest.raises(UserError, match=r"bytes\.jsonl:1: not UTF-8 text"):
        load_tasks([str(tmp_path / "bytes.jsonl")])
    with pytest.raises(UserError, match="no prompts"):
        load_tasks([str(write(tmp_path / "empty.jsonl"))])


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row("a", "x"))
    with pytest.raises(UserError, match="two tasks are called 't'"):
        load_tasks([str(path), str(path)])


def test_the_subset_is_evenly_spaced() -> None:
    prompts = [TaskPrompt("t", str(i), ("x",)) for i in range(10)]
    assert [p.id for p in evenly_spaced(prompts, 4)] == ["0", "2", "5", "7"]
    assert [p.id for p in evenly_spaced(prompts, 4, seed=6)] == ["1", "3", "6", "8"]
    assert evenly_spaced(prompts, None) == evenly_spaced(prompts, 10) == evenly_spaced(prompts, 99) == prompts


def test_the_limit_counts_turns(tmp_path: Path) -> None:
    """A task of two-turn conversations must not weigh twice in a mean over prompts."""
    path = write(tmp_path / "t.jsonl", *(row(str(i), "x", "y") for i in range(10)))
    for limit, ids in ((4, ["0", "5"]), (1, ["0"]), (99, [str(i) for i in range(10)])):
        assert [p.id for p in load_tasks([str(path)], limit=limit)] == ids


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 99))
def test_a_subset_has_the_wanted_size_in_order_and_no_row_twice(count: int, limit: int, seed: int) -> None:
    prompts = [TaskPrompt("t", str(i), ("x",)) for i in range(count)]
    chosen = [int(p.id) for p in evenly_spaced(prompts, limit, seed)]
    assert len(chosen) == min(count, limit)
    assert chosen == sorted(set(chosen))
    gaps = {b - a for a, b in pairwise([*chosen, chosen[0] + count])}  # around the corner, too
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_every_task_file_is_known_and_says_what_is_needed() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(ORDER)
    for name, task in TASKS.items():
        assert "{turn}" in task.prompt, name
        assert {"path", "split", "id", "turns"} <= set(task.hub), name
        assert all((task.version, task.about, task.source, task.licence, task.file)), name


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        (
            "gsm8k",
            {"question": "How many?", "answer": "2"},
            {"id": "gsm8k/test/7", "turns": ["How many?"], "reference": "2"},
        ),
        (
            "math500",
            {"problem": "$x$", "unique_id": "test/a/1.json"},
            {"id": "math500/test/a/1.json", "turns": ["$x$"]},
        ),
        (
            "mbpp",
            {"task_id": 11, "text": "Add.", "test_list": ["assert f(1)", "assert f(2)"]},
            {
                "id": "mbpp/test/11",
                "turns": ["Add.\nYour code should pass these tests:\n\nassert f(1)\nassert f(2)"],
            },
        ),
        (
            "mt_bench",
            {"category": "writing", "prompt_id": 81, "prompt": ["Write {it}.", "Again."]},
            {"id": "mt_bench/writing/81", "turns": ["Write {it}.", "Again."]},
        ),
        (
            "livecodebench",
            {"platform": "atcoder", "question_id": "a", "question_content": "Sum.", "starter_code": ""},
            {"id": "livecodebench/atcoder/a", "turns": ["Sum."]},
        ),
    ],
)
def test_rows_of_the_hub_become_ours(name: str, row: dict, expected: dict) -> None:
    assert convert(row, TASKS[name].hub, 7) == expected


def test_without_a_folder_rows_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    asked = []

    def load_dataset(**where):
        asked.append(where)
        return [{"question": "How many?", "answer": "#### 2"}, {"question": "How few?", "answer": "1"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_tasks(["gsm8k"]) == [
        TaskPrompt("gsm8k", "gsm8k/test/0", ("How many?",), reference="#### 2"),
        TaskPrompt("gsm8k", "gsm8k/test/1", ("How few?",), reference="1"),
    ]
    assert asked == [{"path": "openai/gsm8k", "name": "main", "split": "test"}]

    def unreachable(**where):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(UserError, match=r"^the hub did not give task 'gsm8k' \(no route\): point --data-dir"):
        load_tasks(["gsm8k"])
