"""Traces: the trees that replay saw, line by line; drawn, and refused when they are something else."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from secondguess.bench.plan import Prompt
from secondguess.bench.trace import Tracer, find, read, trace_of
from secondguess.cli import main
from secondguess.commands import eval_run
from secondguess.config import TreeConfig
from secondguess.engine.cycle import CycleTrace
from secondguess.errors import UserError
from secondguess.methods import parse_method
from secondguess.tree.trim import PADDING
from secondguess.types import DraftTree, Verdict
from tiny_folder import tiny_workload

#        0 (root)
#      1    2      node 2 is of level 1, node 5 is padding
#      3    4
TREE = DraftTree(
    tokens_RN=torch.tensor([[9, 1, 2, 3, 4, 0]]),
    parents_RN=torch.tensor([[-1, 0, 0, 1, 2, -1]]),
    depths_RN=torch.tensor([[0, 1, 1, 2, 2, 0]]),
    levels_RN=torch.tensor([[0, 0, 1, 0, 0, 0]]),
    scores_RN=torch.tensor([[0.0, -0.5, -1.0, -0.75, -1.5, -torch.inf]]),
    valid_RN=torch.tensor([[True] * 5 + [False]]),
)
ACCEPTED = CycleTrace(TREE, Verdict(torch.tensor([[0, 2, 4]]), torch.tensor([[2, 4, 7]]), torch.tensor([3])))
MISSED = CycleTrace(TREE, Verdict(torch.tensor([[0, -1]]), torch.tensor([[7, -1]]), torch.tensor([1])))


def written(*traces: CycleTrace) -> list[dict]:
    file = io.StringIO()
    tracer = Tracer(file, [Prompt("t", "a", (1, 1)), Prompt("t", "b", (1, 1, 1))], 0.5, lambda token: f"<{token}>")
    method = parse_method("pr:m=1", TreeConfig(budget=4))
    for trace in traces:
        tracer.listen(method, [1], trace)
    assert tracer.num_cycles(method) == len(traces)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_a_line_tells_all_of_a_cycle() -> None:
    first, second = written(ACCEPTED, MISSED)
    assert first == {
        "task": "t",
        "id": "b",
        "method": "pr:m=1",
        "budget": 4,
        "temperature": 0.5,
        "cycle": 1,
        "root": 3,
        "tokens": [9, 1, 2, 3, 4],
        "parents": [-1, 0, 0, 1, 2],
        "depths": [0, 1, 1, 2, 2],
        "levels": [0, 0, 1, 0, 0],
        "scores": [0.0, -0.5, -1.0, -0.75, -1.5],
        "pieces": ["<9>", "<1>", "<2>", "<3>", "<4>"],
        "path": [0, 2, 4],
        "emitted": [2, 4, 7],
        "emitted_pieces": ["<2>", "<4>", "<7>"],
    }
    assert (second["cycle"], second["root"], second["path"], second["emitted"]) == (2, 6, [0], [7])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fixed = tiny_workload(tmp_path, monkeypatch)
    return lambda name, *more: main([name, *fixed, *more])


def test_a_trace_holds_the_trees_that_eval_saw(command, monkeypatch) -> None:
    flags = ("--method", "eagle3.1,pr", "--budget", "3,8", "--temperature", "0,1", "--batch-size", "3")
    seen: list[tuple[CycleTrace, int]] = []
    keep = lambda tallies, texts, trace: seen.extend((trace, r) for r in range(len(texts)))  # noqa: E731
    monkeypatch.setattr(eval_run, "count", keep)
    assert command("eval", *flags) == 0
    assert command("trace", *flags, "--out", "trees.jsonl", "--json", "made.json") == 0
    lines = list(read(Path("trees.jsonl")))
    assert len(lines) == len(seen) > 100
    for line, (trace, r) in zip(lines, seen, strict=True):
        ours, n = trace_of(line), len(line.tokens)
        assert n == int(trace.tree.valid_RN[r].sum())
        for name in PADDING:
            assert torch.equal(getattr(ours.tree, name)[0], getattr(trace.tree, name)[r, :n]), name
        assert line.path == trace.verdict.path_RD[r, : len(line.path)].tolist()
        assert line.emitted == trace.verdict.tokens_RD[r, : int(trace.verdict.num_emitted_R[r])].tolist()
    rows = json.loads(Path("made.json").read_text())["rows"]
    assert [(r["method"], r["budget"], r["temperature"]) for r in rows][:3] == [
        ("eagle3.1", 3, 0.0),
        ("eagle3.1", 8, 0.0),
        ("pr", 3, 0.0),
    ]
    assert sum(r["num_cycles"] for r in rows) == len(lines)


def test_tree_draws_a_cycle_of_every_method(command, capsys) -> None:
    assert command("trace", "--method", "eagle3.1,pr", "--budget", "5", "--out", "trees.jsonl") == 0
    capsys.readouterr()
    assert main(["tree", "trees.jsonl", "--id", "two1", "--cycle", "2"]) == 0
    out = capsys.readouterr().out
    line = find(Path("trees.jsonl"), "two1", 2)[0]
    assert f"two two1, eagle3.1, B = 5, T = 0, cycle 2, root at token {line.root}\n" in out
    assert "two two1, pr, B = 5" in out
    assert out.count(" newest token\n") == out.count(" bonus\n") == 2
    assert f"{line.emitted_pieces[-1]!r} bonus" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no.jsonl", "--id", "two1"], "no trace no.jsonl"),
        (["one.jsonl", "--id", "two1"], "one.jsonl:1: not a line of a trace"),
        (["trees.jsonl", "--id", "two7"], "no prompt 'two7'; did you mean two"),
        (["trees.jsonl", "--id", "two1", "--cycle", "99"], "of 'two1', not 99"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_exit_2(argv, said, command, capsys) -> None:
    assert command("trace", "--budget", "5", "--out", "trees.jsonl") == 0
    capsys.readouterr()
    assert main(["tree", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method", "ar", "--out", "x.jsonl"], "nothing to replay"),
        ([], "the following arguments are required: --out"),
        (["--out", "no/x.jsonl"], "no folder no"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(flags, said, command, capsys) -> None:
    assert command("trace", *flags) == 2
    assert said in capsys.readouterr().err
    assert not Path("x.jsonl").exists()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"task": "t"}', '{"taks": "t"}'])
def test_damaged_lines_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in written(ACCEPTED)) + text)
    with pytest.raises(UserError, match=r"trees\.jsonl:2: not a line of a trace"):
        list(read(path))
