"""Scripts whose work takes long: a run that was cut short goes on, and ends with what one run would have found."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from secondguess.bench.simulate import Drafting
from secondguess.drafter import shipped, stopwatch
from secondguess.drafter.checkpoint import weights_digest
from secondguess.engine.costs import CostModel, Curve
from secondguess.machine import describe
from secondguess.target.load import load_target
from tiny_folder import save_tiny

SCRIPTS = Path(__file__).parent.parent / "scripts"
Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    shutil.copytree(folder / "drafters", folder / "shipped" / "tiny", ignore=lambda *_: {"other"})
    return folder


@pytest.fixture
def load(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A script as a module; the tiny target's drafters ship."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(shipped, "SHIPPED", tiny / "shipped")
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tiny / "cache"))

    def import_anew(name: str) -> ModuleType:
        for module in ("kept", name):
            sys.modules.pop(module, None)
        return importlib.import_module(name)

    return import_anew


def test_what_is_kept_is_not_made_again(load: Load, tmp_path: Path) -> None:
    kept, path, made = load("kept"), tmp_path / "kept.jsonl", list[int]()

    def ask(number: int, minutes: float, revision: str = "one") -> tuple[Any, set[str]]:
        asked = kept.Kept(path, minutes, revision)
        return asked({"number": number}, lambda: made.append(number) or number**2), asked.revisions

    assert ask(3, 1) == (9, {"one"})
    assert ask(4, 1) == (16, {"one"})
    assert ask(3, 1, "two") == (9, {"one"})
    with path.open("ab") as file:
        file.write(b'{"key": "cut sho')  # by a kill
    assert ask(4, -1) == (16, {"one"}), "what is there is there, however late"
    with pytest.raises(kept.TimeIsUp, match=r"2 answers are in .*kept\.jsonl: run the same command again"):
        ask(5, -1)
    assert ask(5, 1, "two") == (25, {"two"})
    assert made == [3, 4, 5]


def test_regimes_go_on_where_they_were(
    load: Load, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    regimes = load("regimes")
    questions = {"English": ["Why?", "How?"], "German": ["Warum?", "Wie?"]}
    known = {"questions": questions, "templates": {"Q": "Q: {question} A:"}, "systems": {"short": "Be brief"}}
    wording, text = tmp_path / "wording.json", tmp_path / "text.txt"
    wording.write_text(json.dumps(known))
    text.write_text("A page of more than forty words. " * 9)
    for name, value in {"MAX_TOKENS": 4, "WINDOWS": 2, "WORDING": wording, "TEXT": text}.items():
        monkeypatch.setattr(regimes, name, value)
    out, decode, decoded = tmp_path / "out.json", regimes.decode, list[Any]()

    def count_and_stop(llm: Any, ids: Any, method: str) -> Any:
        decoded.append((tuple(ids), method))
        if len(decoded) == 9:
            raise KeyboardInterrupt
        return decode(llm, ids, method)

    monkeypatch.setattr(regimes, "decode", count_and_stop)
    command = [str(out), "40", "--target", str(tiny / "target")]
    with pytest.raises(KeyboardInterrupt):
        regimes.main(command)
    assert len(json.loads(out.read_text())["rows"]) == 1  # of six answers each
    assert regimes.main([*command, "--minutes", "-1"]) == 1
    assert "time is up, 8 answers are in" in capsys.readouterr().out
    assert regimes.main(command) == 0
    found = json.loads(out.read_text())
    assert len(decoded) == 1 + len(set(decoded)), "but for the one that was interrupted none was begun twice"
    names = ["no chat template", "chat template: Q", "system prompt: short", "English", "German", "length 40"]
    assert [row["regime"] for row in found["rows"]] == names
    assert all(row["identical_pr"] == len(row["prompt_tokens"]) == 2 for row in found["rows"])
    assert all(row["tau_all_pr"] >= row["tau_all_pr_low"] >= 1 for row in found["rows"])
    assert found["revisions"]


def test_looping_prompts_are_left_out_of_tau(load: Load) -> None:
    regimes = load("regimes")
    texts = [list(range(20)), list(range(20)), [7] * 20]
    accepted = {"ar": (0, 0, 0), "eagle3.1": (2, 2, 8), "pr": (2, 6, 8)}
    found = {
        method: [{"token_ids": t, "cycles": 4, "accepted": n} for t, n in zip(texts, accepted[method], strict=True)]
        for method in regimes.METHODS
    }
    row = regimes.row("any", [(1, 2), (3,), (4,)], found)
    assert (row["tau_pr"], row["tau_all_pr"], row["looping"]) == (2.0, 28 / 12, 1)
    assert (row["tau_pr_low"], row["tau_pr_high"]) == (1.5, 2.5), "one of the two prompts, drawn twice"
    assert (row["tau_eagle3.1_low"], row["tau_eagle3.1_high"]) == (1.5, 1.5)
    assert row["gain_pr"] == pytest.approx(2.0 / 1.5 - 1)
    assert (row["gain_pr_low"], row["gain_pr_high"]) == pytest.approx((0.0, 2.5 / 1.5 - 1))
    assert regimes.row("any", [(4,)], {m: answers[2:] for m, answers in found.items()})["tau_pr"] is None


def test_regimes_have_eight_prompts_that_share_nothing(load: Load) -> None:
    regimes = load("regimes")
    known = json.loads(regimes.WORDING.read_text(encoding="utf-8"))
    assert {len(set(questions)) for questions in known["questions"].values()} == {8}
    text = regimes.TEXT.read_text(encoding="utf-8").split()
    llm = SimpleNamespace(encode=lambda given: text if isinstance(given, str) else given[0]["content"], decode=" ".join)
    eighth, third = len(text) // 8, len(text) // 3
    (_, eight), (_, three) = regimes.by_length(llm, [eighth, third])
    asked = "\n\nWhat is this text about?"
    assert [prompt.removesuffix(asked) for prompt in eight] == [
        " ".join(text[i * eighth : (i + 1) * eighth]) for i in range(8)
    ]
    assert len(three) == 3, "the text has no more of that length"


def test_vllm_is_compared_with_itself_and_with_our_chains(load: Load, tmp_path: Path) -> None:
    check = load("check_vllm")
    plain = {"a": [1, 2], "b": [3]}
    texts = {check.PLAIN: plain, check.EAGLE: plain, "vllm:pr": plain | {"a": [1]}}
    lines = [{"method": m, "id": i, "token_ids": ids} for m, found in texts.items() for i, ids in found.items()]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check.texts_of(tmp_path) == texts
    assert check.check_texts("eagle3.1", texts) == []
    assert check.check_texts("pr", texts) == ["pr: vllm:pr writes another text than vllm: a"]
    for theirs, wrong in ((2.03, 0), (1.97, 0), (2.05, 1), (1.5, 1)):
        rows = {check.OURS: {"acceptance_length": 2.0}, check.EAGLE: {"acceptance_length": theirs}}
        assert len(check.check_tau("pr", rows)) == wrong


def test_the_simulation_is_compared_with_the_best_round(load: Load) -> None:
    """Two requests at once: prefills of 1 s and 2 s, then cycles of 0.5 s that accept one token each."""
    check = load("scale_check")
    flat = Curve((1.0,), (0.5,))
    costs = CostModel((1,), (flat,), Curve((1.0,), (0.0,)), Curve((1.0,), (0.0,)))
    requests = [
        {"prompt": 5, "answer": 5, "prefill_s": 1.0, "accepted": [[1, 2]]},
        {"prompt": 6, "answer": 5, "prefill_s": 2.0, "accepted": [[1, 2]]},
    ]
    rounds = [{"seconds": seconds, "requests": requests} for seconds in (5.0, 4.0, 9.0)]
    row = check.compare(check.Case("eagle3.1", 4), costs, rounds)
    assert (row["engine_s"], row["simulated_s"], row["ratio"], row["tau"]) == (4.0, 4.0, 1.0, 2.0)
    assert row["close"]
    assert not check.compare(check.Case("eagle3.1", 4), costs, rounds[2:])["close"]
    drafting = check.Case("pr", 1).drafting
    assert drafting == Drafting(3, 3, 9)
    assert check.Case("ar", 1).drafting == Drafting()


def test_a_round_is_of_one_drafter_and_one_machine(load: Load, tiny: Path) -> None:
    check, target = load("scale_check"), load_target(str(tiny / "target"))
    rounds = {method: check.made_of(target, check.Case(method, 1), 0) for method in check.METHODS}
    folders = {"ar": None, "eagle3.1": tiny / "drafters" / "eagle3.1", "pr": tiny / "drafters" / "pr"}
    for method, folder in folders.items():
        assert rounds[method]["drafter"] == (folder and weights_digest(folder))
        assert rounds[method]["machine"] == describe()


def tables(text: str) -> list[list[str]]:
    """Markdown's, each as its lines."""
    parts = groupby(text.splitlines(), lambda line: line.startswith("|"))
    return [list(lines) for is_table, lines in parts if is_table]


def test_the_plan_in_the_docs_is_the_one_that_is_printed(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("scale").plan()
    printed = tables(capsys.readouterr().out)
    assert len(printed) == 4
    heads = [table[0] for table in printed]
    shown = tables((SCRIPTS.parent / "docs" / "scale.md").read_text(encoding="utf-8"))
    assert [table for table in shown if table[0] in heads] == printed, "put in what scripts/scale.py plan prints"


def test_cycles_and_their_products_are_timed(
    load: Load, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perf = load("perf")
    monkeypatch.setattr(perf, "CONTEXT", 16)
    perf.main([str(tmp_path), "--target", str(tiny / "target"), "--shape", "3x3,6x2", "--rounds", "2"])
    rows = json.loads((tmp_path / "perf.json").read_text())["rows"]
    shapes = [(row["method"], row["budget"], row["steps"]) for row in rows]
    assert shapes == [("ar", 0, 0), *((m, *shape) for shape in ((3, 3), (6, 2)) for m in perf.METHODS)]
    for row in rows:
        assert 0 < row["products_ms"] < row["cycle_ms"]
        assert len(row["rounds_ms"]["cycle"]) == 2
        assert (row["over_eagle"] is None) == (row["method"] == "ar")
    assert rows[1]["over_eagle"] == [1.0, 1.0, 1.0]
    assert (tmp_path / "perf.md").read_text().count("\n") == 2 + len(rows)
    assert (tmp_path / "perf.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="which tells a process's memory in /proc")
def test_memory_is_measured_beside_what_has_to_be_held(load: Load, tiny: Path, tmp_path: Path) -> None:
    memory, out = load("memory"), tmp_path / "memory.json"
    small = ["--dtype", "float32", "--method", "ar", "--requests", "2", "--max-new-tokens", "4"]
    memory.main([str(out), "--target", str(tiny / "target"), *small])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["needed_mb"] == row["code_mb"] + row["weights_mb"] + row["kv_mb"]
    assert 0 < row["weights_mb"] < 1
    assert row["code_mb"] < row["decoding_mb"]


def test_every_case_is_measured_and_simulated(
    load: Load, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = load("scale_check")
    monkeypatch.setattr(check, "MAX_TOKENS", 6)
    monkeypatch.setattr(check, "ROUNDS", 1)
    monkeypatch.setattr(check, "MAX_MODEL_LEN", 512)
    monkeypatch.setattr(stopwatch, "LIMIT_S", 0.2)
    check.main(load("scale").parse(["check", str(tmp_path / "out.json"), "--target", str(tiny / "target")]))
    found = json.loads((tmp_path / "out.json").read_text())["rows"]
    cases = [(row["method"], row["slots"]) for row in found]
    assert cases == [(m, n) for n in (1, 4) for m in ("ar", "eagle3.1", "pr")]
    assert all(row["simulated_s"] > 0 and row["tau"] >= 1 for row in found)
    assert found[0]["tau"] == found[3]["tau"] == 1
