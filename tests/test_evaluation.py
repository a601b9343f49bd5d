"""An eval's counts: rows over groups of tasks, what is read back from JSON, the two methods at their best, tables."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from secondguess.bench.acceptance import Tally
from secondguess.bench.best import duels, halves
from secondguess.bench.evaluation import Evaluation, Run
from secondguess.cli import main
from secondguess.commands.markdown_eval import markdown
from secondguess.commands.workload import check_groups
from secondguess.errors import UserError

EAGLE, PR = ({"budget": 8, "num_reconsider": m} for m in (0, 3))
TASKS = ("math", "math", "code", "code", "chat", "chat")


def run(method: str, *lengths: int, shape: dict[str, int] | None = None) -> Run:
    """Two cycles on each text, of which the first accepts so many tokens. The text of the last task's end loops."""
    texts = [
        Tally(i == 5, f"{TASKS[i]}/{i}", Counter((n, 0)), [6, 2], [n - n // 3, n // 3], i)
        for i, n in enumerate(lengths)
    ]
    return Run(method, shape or (PR if method.startswith("pr") else EAGLE), texts)


FOUND = Evaluation(0.0, TASKS, [run("eagle3.1", 1, 1, 2, 2, 0, 9), run("pr", 2, 1, 2, 4, 0, 9)])


def test_rows_of_a_group_pool_its_texts() -> None:
    rows = {(r["method"], r["task"]): r for r in FOUND.rows("eagle3.1", {"hard": ("code", "math")})}
    assert list(dict.fromkeys(task for _, task in rows)) == ["math", "code", "chat", "hard", "all tasks"]
    hard = rows["pr", "hard"]
    assert hard["num_prompts"] == 4
    assert hard["acceptance_length"] == (2 + 1 + 2 + 4 + 8) / 8
    assert hard["gain"] == pytest.approx(17 / 14 - 1)
    assert hard["gain_low"] < hard["gain"] < hard["gain_high"]
    assert hard["acceptance_length_low"] < hard["acceptance_length"] < hard["acceptance_length_high"]
    assert rows["eagle3.1", "hard"]["gain"] is None


def test_rows_of_a_task_are_there_without_loops() -> None:
    (row,) = (r for r in FOUND.rows("eagle3.1", {}) if (r["method"], r["task"]) == ("eagle3.1", "chat"))
    assert row["acceptance_length"] == 13 / 4
    names = [f"acceptance_length_nonlooping{end}" for end in ("", "_low", "_high")]
    assert [row[name] for name in names] == [1.0] * 3


def test_json_holds_all_that_was_counted() -> None:
    again = Evaluation.from_json(json.loads(json.dumps(FOUND.to_json())))
    assert again.rows("eagle3.1", {}) == FOUND.rows("eagle3.1", {})
    assert [r.tallies for r in again.runs] == [r.tallies for r in FOUND.runs]
    assert FOUND.to_json()["runs"][1]["counts"][3] == [6, 2, 3, 1, 3, 1, 0, 0, 0, 1]
    assert FOUND.to_json()["conversations"][:3] == ["math/0", "math/1", "code/2"]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([("code", ("math",))], "--group code: this name is taken"),
        ([("all tasks", ("math",))], "--group all tasks: this name is taken"),
        ([("a", ("math",)), ("a", ("code",))], "--group a: this name is taken"),
        ([("a", ("math", "mth"))], "--group a: no task mth; there are math, code"),
    ],
)
def test_bad_groups_are_refused(groups, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_groups(groups, ["math", "code"])


def test_one_half_chooses_and_the_other_measures() -> None:
    """The first half (texts 0, 2, 4) prefers pr:k=9, which is worse on the other (1, 3): no luck is counted."""
    eagles = run("eagle3.1", 1, 1, 1, 1, 1, 0), run("eagle3.1:k=9", 0, 4, 0, 4, 0, 9)
    lucky, control = run("pr:k=9", 3, 0, 3, 0, 3, 0), run("pr:m=0", 9, 9, 9, 9, 9, 9, shape=EAGLE)
    elsewhere = run("pr:k=12", 9, 9, 9, 9, 9, 9, shape=PR | {"budget": 4})
    found = Evaluation(1.0, TASKS, [*eagles, run("pr", 2, 2, 2, 2, 2, 0), lucky, control, elsewhere])
    (duel,) = duels(found)
    assert (duel["method"], duel["over"], duel["budget"], duel["temperature"]) == ("pr:k=9", "eagle3.1", 8, 1.0)
    assert duel["num_prompts"] == 2
    assert (duel["acceptance_length"], duel["acceptance_length_over"]) == (1.0, 1.5)
    assert duel["gain"] == pytest.approx(1 / 1.5 - 1)


def test_without_a_choice_nothing_is_chosen() -> None:
    assert duels(FOUND) == []
    assert duels(replace(FOUND, runs=[run("pr", *[1] * 6), run("pr:k=9", *[1] * 6)])) == []
    alone = replace(FOUND, tasks=TASKS[:1], runs=[run("eagle3.1", 1), run("pr", 1), run("pr:k=9", 1)])
    assert duels(alone) == []


def test_the_turns_of_a_conversation_choose_together() -> None:
    texts = [Tally(False, name, Counter([1])) for name in ("a", "b", "b", "c", "d")]
    assert halves([*texts, Tally(True, "e", Counter([1])), Tally(False, "f")]) == ([0, 3], [1, 2, 4])


def test_markdown_has_a_row_per_method_and_a_column_per_task_and_group() -> None:
    blocks = markdown(FOUND, "eagle3.1", {"hard": ("code", "math")}).split("\n\n")
    assert [block.partition("**:")[0] for block in blocks[::2]] == [
        "**T = 0, budget 8, 6 prompts",
        "**T = 0, budget 8, without the 1 of 6 prompts that loop",
    ]
    head, rule, eagle, pr = blocks[1].splitlines()
    assert head == "|  | math | code | chat | hard | all tasks |"
    assert rule.count("---") == 6
    assert eagle.startswith("| eagle3.1 | 1.50 [1.50, 1.50] | 2.00 [2.00, 2.00] | 3.25 [")
    assert pr.startswith("| pr | 1.75 [1.50, 2.00], +16.7 [+0.0, +33.3] |")
    assert "1.00 [1.00, 1.00]" in blocks[3]


def test_tables_are_made_of_what_eval_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("eval.json").write_text(json.dumps({"against": "eagle3.1", "evaluations": [FOUND.to_json()]}))
    assert main(["tables", "eval.json", "--group", "hard=math,code"]) == 0
    assert capsys.readouterr().out == markdown(FOUND, "eagle3.1", {"hard": ("math", "code")}) + "\n"
    assert main(["tables", "eval.json", "--against", "pr"]) == 0
    assert "gain over pr in %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["eval.json", "--against", "ar"], "--against ar is none of the methods that draft: eagle3.1, pr"),
        (["eval.json", "--group", "hard"], "must be NAME=TASK,..., got 'hard'"),
        (["eval.json", "--group", "hard=math,x"], "no task x; there are math, code, chat"),
        (["old.json"], "old.json is nothing that 'secondguess eval --json' wrote, or too old: KeyError"),
        (["none.json"], "none.json is nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags, said, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("eval.json").write_text(json.dumps({"against": "eagle3.1", "evaluations": [FOUND.to_json()]}))
    Path("old.json").write_text(json.dumps({"record": {}, "rows": []}))
    assert main(["tables", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
