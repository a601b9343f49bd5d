"""``secondguess reproduce`` from flags to report, on tiny models and two of the paper's tasks."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
from collections import Counter
from html.parser import HTMLParser
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from secondguess.bench.paper import AVERAGE, PAPER
from secondguess.cli import main
from secondguess.commands import reproduce as command_module
from secondguess.commands import reproduce_work
from secondguess.commands.record import make_record
from secondguess.errors import install
from secondguess.reproduce import arms as reproduce_arms
from secondguess.reproduce.layout import FORMATS
from tiny_folder import save_tiny

ARMS = ("--arm", "eagle3.1=drafters/eagle3.1", "--arm", "pr=drafters/pr")
SMALL = ("--limit", "2", "--live-limit", "1", "--max-new-tokens", "8", "--data-dir", "data")
QUICK = ("--budget", "8", "--temperature", "1", *SMALL, *ARMS)  # greedy tiny models loop
VOID = {"meta", "img", "br", "input"}


def tiny_paper(folder: Path, monkeypatch: pytest.MonkeyPatch, family: str = "llama") -> None:
    """A tiny target, its drafters and two tasks in ``folder``, which becomes the current one and holds the cache."""
    save_tiny(folder, family=family)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(folder / "cache"))
    (folder / "data").mkdir()
    for name, rows in (("gsm8k_test", [["How many?"], ["And now?"]]), ("mt_bench", [["Hello.", "Go on."]])):
        lines = [json.dumps({"id": f"{name}/{i}", "turns": turns}) + "\n" for i, turns in enumerate(rows)]
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_paper(tmp_path, monkeypatch)
    return tmp_path


class Page(HTMLParser):
    """What a report's HTML holds; raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.numbers: list[tuple[str, str]] = []  # class of the table row, text
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        named = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action") and value]
        if tag not in VOID:
            self.open.append((tag, named.get("class") or ""))

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data) -> None:
        rows = [kind for tag, kind in self.open if tag == "tr"]
        if rows and self.open[-1][0] == "span":
            self.numbers.append((rows[-1], data.strip()))


def cells(folder: Path) -> list[dict]:
    return json.loads((folder / "cells.json").read_text())["rows"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory):
    """``reproduce all``: its folder, what the plan said before, and the jobs that ran."""
    folder = tmp_path_factory.mktemp("all")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_paper(folder, monkeypatch)
        more = ("--arm", "hass=drafters/eagle3.1", "--arm", "hass+pr=drafters/pr", "--out", "out")
        argv = ["reproduce", "all", "target", *QUICK, *more]
        assert main([*argv, "--plan", "--json", "plan.json"]) == 0
        assert not (folder / "out").exists()
        ran = []
        run_job = reproduce_work.run_job
        monkeypatch.setattr(reproduce_work, "run_job", lambda world, job, c: ran.append(job) or run_job(world, job, c))
        assert main(argv) == 0
    return folder / "out", json.loads((folder / "plan.json").read_text())["rows"], ran


def test_the_plan_is_what_ran(everything) -> None:
    folder, plan, ran = everything
    shown = [(row["kind"], tuple(row["tasks"]), row["temperature"], row["batch_size"], row["methods"]) for row in plan]
    assert shown == [(job.kind, job.tasks, job.temperature, job.batch_size, job.methods) for job in ran]
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in plan)
    assert len(list((folder / "records").iterdir())) == sum(len(job.measurements) for job in ran)
    assert {job.kind for job in ran} == {"replay", "live", "diagnosis"}
    assert {job.batch_size for job in ran} == {1, 2}  # there are not four prompts


def test_every_cell_has_a_state(everything) -> None:
    rows = cells(everything[0])
    assert {row["table"] for row in rows} == PAPER.keys()
    for row in rows:
        assert row["state"] in ("measured", "computed", "found", "not measured", "paper")
        assert (row["value"] is None) == (row["state"] == "not measured")
        assert bool(row["why"]) == (row["state"] == "not measured")
    whys = {row["why"] for row in rows}
    assert any("no drafter no-balance ships" in why for why in whys)
    assert any("no drafter two-layer ships" in why for why in whys)
    assert any("mbpp" in why and "not found" in why for why in whys)
    assert not any("not measured yet" in why for why in whys)
    assert sum(row["state"] == "paper" for row in rows) > 200
    with (everything[0] / "cells.csv").open(newline="") as file:
        assert [row["row"] for row in csv.DictReader(file)] == [row["row"] for row in rows]


def test_values_of_known_cells(everything) -> None:
    found = {tuple(row[x] for x in ("table", "row", "column", "quantity")): row for row in cells(everything[0])
             if row["state"] != "paper"}  # fmt: skip
    assert found["table8", "rows", "GSM8K", "count"]["value"] == 2
    assert found["table8", "rows", "MBPP", "count"]["state"] == "not measured"
    assert found["table9", "a serial pass every step", "B = 8", "bound"]["value"] == 15 / 8
    assert found["table1", "PR", "GSM8K", "tau"]["value"] == found["table6", "HASS + PR", "GSM8K", "tau"]["value"]
    assert found["table4", "PR, m = 0 over EAGLE-3.1", "GSM8K", "speedup gain"]["value"] > -1
    assert found["table9", "PR, in series / EAGLE-3.1", "B = 8", "cycle ratio"]["value"] > 0


def test_the_page_is_whole_and_alone_and_shows_the_numbers_of_cells_json(everything) -> None:
    folder = everything[0]
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.links
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert not any(word in text for word in ("url(", "@import", "<script"))
    assert "prefers-color-scheme: dark" in text
    assert text.count("<img") >= 5
    assert '<svg class="steps"' in text
    shown = {kind: Counter(n for k, n in page.numbers if k == kind) for kind in ("here", "paper")}
    expected: dict[str, Counter[str]] = {"here": Counter(), "paper": Counter()}
    for row in cells(folder):
        number = "-" if row["value"] is None else FORMATS[row["quantity"]].format(row["value"])
        again = (row["table"], row["column"]) == ("table1", AVERAGE)  # in the summary
        expected["paper" if row["state"] == "paper" else "here"][number] += 1 + again
    assert shown == expected
    markdown = (folder / "report.md").read_text()
    assert sum(line.startswith(("## Table ", "## Figure ")) for line in markdown.splitlines()) == len(PAPER)
    assert all((folder / name).is_file() for name in pictures(markdown))


def pictures(markdown: str) -> list[str]:
    return [line.partition("](")[2].rstrip(")") for line in markdown.splitlines() if line.startswith("![")]


def test_the_picture_has_a_frame_per_forward_and_one_for_the_verdict(everything) -> None:
    [path] = everything[0].rglob("coforwarding.svg")
    svg = path.read_text()
    Page(svg)
    assert svg.count("<g ") == 9
    page = (everything[0] / "report.html").read_text()
    assert page.count('<input type="radio"') == 9
    assert page.count(" checked>") == 1
    assert "Forward 1 of 8: the newest token" in svg
    assert "Forward 8 of 8: " in svg
    assert 'class="ring"' in svg
    assert "The target checks 8 guesses" in svg.replace("\n", " ")


def test_a_killed_run_goes_on(workplace: Path, monkeypatch, capsys) -> None:
    argv = ["reproduce", "table1", "target", *QUICK, "--out"]
    run_job, ran = reproduce_work.run_job, []

    def until_killed(world, job, console):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(job)
        return run_job(world, job, console)

    monkeypatch.setattr(reproduce_work, "run_job", until_killed)
    assert main([*argv, "part"]) == 130
    assert "go on with the same command" in capsys.readouterr().err
    assert not Path("part/cells.json").exists()
    before = {path: path.read_bytes() for path in Path("part/records").iterdir()}
    assert len(before) == 4
    monkeypatch.setattr(reproduce_work, "run_job", lambda world, job, c: ran.append(job) or run_job(world, job, c))
    assert main([*argv, "part"]) == 0
    assert [(job.kind, job.tasks) for job in ran] == [
        (kind, (task,)) for kind in ("replay", "live") for task in ("gsm8k", "mt_bench")
    ]
    assert all(path.read_bytes() == data for path, data in before.items())
    assert main([*argv, "whole"]) == 0
    taus = [[r for r in cells(Path(folder)) if r["quantity"].startswith("tau")] for folder in ("part", "whole")]
    assert taus[0] == taus[1]
    assert main([*argv, "part"]) == 0
    assert len(ran) == 8  # the last run measured nothing


def live_records(folder: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in Path(folder, "records").glob("live-*.json")]


def test_times_are_divided_by_those_of_their_own_session(workplace: Path, monkeypatch) -> None:
    run_job, ran = reproduce_work.run_job, []
    monkeypatch.setattr(reproduce_work, "run_job", lambda world, job, c: ran.append(job) or run_job(world, job, c))
    monkeypatch.setattr("secondguess.commands.reproduce.make_record", lambda: made | {"revision": revisions[0]})
    made, revisions = make_record(), ["one"]
    more = ("target", *QUICK, "--tasks", "gsm8k", "--out", "out")
    assert main(["reproduce", "table1", *more]) == 0
    [first] = {record["result"]["session"] for record in live_records("out")}
    revisions[0] = "two"
    assert main(["reproduce", "table9", *more]) == 0
    assert [len(job.measurements) for job in ran] == [2, 2, 4]  # EAGLE-3.1 and PR once more, beside the other two
    sessions = Counter(record["result"]["session"] for record in live_records("out"))
    assert sorted(sessions.values()) == [2, 4]
    assert sessions[first] == 2
    assert main(["reproduce", "table1", *more]) == 0
    assert len(ran) == 3
    assert ", revision one, two, " in Path("out/report.md").read_text()  # tau of the first run, times of the second


def test_a_prompt_without_room_stops_no_other_task(workplace: Path, capsys) -> None:
    long = json.dumps({"id": "long", "turns": ["so " * 20000]}) + "\n"
    with Path("data/gsm8k_test.jsonl").open("a") as file:
        file.write(long)
    argv = ["reproduce", "table1", "target", *QUICK, "--limit", "3", "--live-limit", "3", "--out", "out"]
    assert main(argv) == 1
    assert "not measured: replay: gsm8k, T = 1: task gsm8k, row long: " in capsys.readouterr().err
    for row in cells(Path("out")):
        if row["state"] != "paper" and row["column"] in ("GSM8K", "MT-Bench"):
            assert (row["state"] == "measured") == (row["column"] == "MT-Bench")
            assert ("row long: " in row["why"]) == (row["column"] == "GSM8K")


def test_check_measures_times_too_and_decodes_anew(workplace: Path, monkeypatch) -> None:
    rows = [json.dumps({"id": str(i), "turns": [f"How many are {i} and {i}?"]}) + "\n" for i in range(5)]
    Path("data/gsm8k_test.jsonl").write_text("".join(rows))
    more = ("--limit", "5", "--live-limit", "5", "--tasks", "gsm8k", "--out", "out")
    argv = ["reproduce", "table1", "target", *QUICK, *more]
    assert main(argv) == 0
    assert main([*argv, "--check"]) in (0, 1)  # of a tiny model no two times are alike
    [last] = Path("out").glob("check-*")
    rows = json.loads((last / "check.json").read_text())["rows"]
    assert len({row["quantity"].removesuffix(" gain") for row in rows}) == 2
    assert all(row["agrees"] for row in rows if row["quantity"].startswith("tau"))
    [texts] = (last / "texts").glob("*/texts.jsonl")
    assert len(texts.read_text().splitlines()) == 5


def test_check_agrees_with_what_was_measured_and_finds_what_was_not(workplace: Path, capsys) -> None:
    argv = ["reproduce", "table1", "target", *QUICK, "--out", "out"]
    assert main([*argv, "--check"]) == 2
    assert "nothing to check" in capsys.readouterr().err
    assert main(argv) == 0
    assert main([*argv, "--check", "--check-seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 cells agree" in out
    for path in Path("out/records").glob("replay-*.json"):
        content = json.loads(path.read_text())
        for unit, by in zip(content["result"]["units"], (3, 5), strict=True):
            unit[2] += by * (1 + len(content["made_of"]["variant"]["drafter"]))
        path.write_text(json.dumps(content))
    assert main([*argv, "--check"]) == 1
    assert "0 of 1 cells agree" in capsys.readouterr().out
    [*_, last] = sorted(Path("out").glob("check-*"))
    assert [row["agrees"] for row in json.loads((last / "check.json").read_text())["rows"]] == [False]


def test_other_settings_are_other_measurements(workplace: Path) -> None:
    argv = ["reproduce", "table8", "target", *QUICK, "--out", "out"]
    assert main(argv) == 0  # nothing to measure
    assert not Path("out/records").exists()
    one = ["reproduce", "table6", "target", *QUICK, "--tasks", "gsm8k", "--out", "out"]
    hass = ("--arm", "hass=drafters/eagle3.1", "--arm", "hass+pr=drafters/pr")
    assert main([*one, *hass]) == 0
    first = set(Path("out/records").iterdir())
    assert len(first) == 4
    assert main([*one, *hass, "--max-new-tokens", "9"]) == 0
    assert len(set(Path("out/records").iterdir()) - first) == 4


def test_a_text_that_is_not_plain_decodings_is_told(workplace: Path, monkeypatch, capsys) -> None:
    from secondguess.bench.report import Findings

    monkeypatch.setattr(Findings, "complaints", lambda self: ["NOT LOSSLESS: pr on gsm8k 1"])
    argv = ["reproduce", "table9", "target", *QUICK, "--out", "out"]
    assert main(argv) == 1
    assert "NOT LOSSLESS: pr on gsm8k 1" in capsys.readouterr().out
    assert Path("out/report.html").read_text().count("NOT LOSSLESS") == 1


TINY = {  # what each command of scripts/paper.sh is given besides
    "prepare": ("--max-new-tokens", "8", "--device", "cpu", "--dtype", "float32"),
    "train": (
        *("draft_vocab_size=64", "unroll_steps=2", "epochs=1", "batch_size=2", "held_out=0.2", "eval_responses=0"),
        "device=cpu",
    ),
    "reproduce": (*SMALL, "--device", "cpu", "--dtype", "float32", "--plan", "--json", "plan.json"),
}


def paper_commands(*args: str) -> list[list[str]]:
    """Those that ``scripts/paper.sh`` would run."""
    script = Path(__file__).parent.parent / "scripts" / "paper.sh"
    dry = os.environ | {"DRY_RUN": "1"}
    printed = subprocess.run([script, *args], env=dry, capture_output=True, check=True, text=True)
    return [shlex.split(line) for line in printed.stdout.splitlines()]


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3"))]
)
def test_from_weights_to_report_for_each_family_of_the_paper(family: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """``scripts/paper.sh``, command by command, on a tiny model: drafters for all rows, then the plan of the report."""
    tiny_paper(tmp_path, monkeypatch, family)
    Path("prompts.txt").write_text("".join(f"What is {i} and {i}?\n" for i in range(8)))
    make_folder, *commands = paper_commands("target", "prompts.txt", "runs/tiny", "--seed", "1")
    assert make_folder == ["mkdir", "-p", "runs/tiny"]
    Path("runs/tiny").mkdir(parents=True)
    for program, name, *argv in commands:
        assert program == "secondguess"
        assert main([name, *argv, *TINY[name]]) == 0, (name, argv)
    arms = [folder for flag, folder in pairwise(commands[-1]) if flag == "--arm"]
    assert [arm.partition("=")[0] for arm in arms] == list(reproduce_arms.ARMS)
    out = capsys.readouterr().out
    assert "(from a few timed prompts)" in out
    whys = [line for line in out.splitlines() if line.startswith("cannot be measured: ")]
    assert whys
    assert all("not found in data" in why or "prompts to decode together" in why for why in whys)
    rows = json.loads(Path("plan.json").read_text())["rows"]
    assert [kind for kind, _ in groupby(row["kind"] for row in rows)] == ["replay", "diagnosis", "live"]
    assert not Path("runs/tiny/report").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["table10", "target"], "invalid choice: 'table10'"),
        (["table1", "nowhere"], "no such target"),
        (["table1", "target", "--tasks", "gsm8"], "--tasks: the paper has no 'gsm8'; did you mean gsm8k?"),
        (["table1", "target", "--tasks", "mbpp"], "task 'mbpp' not found"),
        (["table1", "target", "--arm", "pr"], "give NAME=FOLDER"),
        (["table1", "target", "--arm", "pr=drafters/eagle3.1"], "has no self-query"),
        (["table1", "target", "--arm", "pr=drafters/other"], "was trained for another"),
        (["table1", "target", "--budget", "0"], "budget must be at least 1"),
        (["table1", "target", "--temperature", "-1"], "temperature must be 0 or more"),
        (["table1", "target", "--live-limit", "0"], "--live-limit must be at least 1"),
        (["table1", "target", "--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["table1", "target", "--plan", "--check"], "--plan and --check exclude each other"),
        (["table1", "target", "--out", "data/mt_bench.jsonl"], "mt_bench.jsonl is a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(argv, said, workplace: Path, capsys) -> None:
    assert main(["reproduce", *argv, "--data-dir", "data"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("secondguess: ")
    assert said in err


def test_a_damaged_record_is_named(workplace: Path, capsys) -> None:
    argv = ["reproduce", "table9", "target", *QUICK, "--out", "out"]
    assert main(argv) == 0
    path = next(Path("out/records").iterdir())
    path.write_text("{")
    assert main(argv) == 2
    assert f"{path} is damaged" in capsys.readouterr().err


def test_without_matplotlib_the_way_to_get_it_is_named(workplace: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command_module, "find_spec", lambda name: None)
    assert main(["reproduce", "table1", "target", *QUICK]) == 2
    assert install("plots") in capsys.readouterr().err
