"""Diagnosis: every number on a hand-computed case, figures that show them, and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from secondguess.bench.diagnosis import ALL, Diagnosis, Nodes, Positions, Share, bins, diagnose, wilson
from secondguess.bench.observe import Position, table
from secondguess.cli import main
from secondguess.commands import diagnose as command_module
from secondguess.commands import plots
from secondguess.commands.show_diagnosis import markdown, rich_tables
from secondguess.errors import install
from tiny_folder import tiny_workload

# Drafter's confidence at level 0 and 1, the target's, right at level 0 and 1, in the draft vocabulary.
POSITIONS = [
    Position(0.95, 0.90, 0.99, True, True, True),
    Position(0.92, 0.30, 0.40, True, False, True),
    Position(0.90, 0.80, 0.70, False, False, True),
    Position(0.60, 0.70, 0.95, False, True, True),
    Position(0.55, 0.35, 0.95, False, False, False),
    Position(0.50, 0.60, 0.50, True, True, True),
    Position(0.30, 0.50, 0.91, False, True, True),
    Position(0.20, 0.60, 0.92, False, True, True),
    Position(0.10, 0.05, 0.20, False, False, False),
    Position(0.05, 0.10, 0.30, True, True, True),
]
# Path probability, on the target's path, depth, level.
NODES = [
    (0.91, True, 1, 0),
    (0.99, True, 1, 0),
    (0.95, False, 1, 1),
    (0.45, True, 2, 1),
    (0.41, False, 2, 0),
    (0.05, False, 3, 1),
    (1.0, True, 4, 0),
]


def diagnosis(positions=POSITIONS, nodes=NODES) -> Diagnosis:
    return diagnose(table(Positions, positions), table(Nodes, nodes), {"offered": 8, "duplicate": 6, "raised": 3})


def test_wilson_interval_of_the_textbook() -> None:
    found = wilson(1, 10)
    assert (found.hits, found.count, found.share) == (1, 10, 0.1)
    # (0.1 + 0.19207) / 1.38415 -+ 1.95996 sqrt(0.009 + 0.0096036) / 1.38415
    assert (found.low, found.high) == pytest.approx((0.017876, 0.404150), abs=1e-5)
    assert wilson(0, 0) == Share(0, 0, None, None, None)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_lies_in_its_interval(hits_and_count) -> None:
    found = wilson(*hits_and_count)
    assert found.low is not None
    assert found.share is not None
    assert found.high is not None
    assert 0 <= found.low <= found.share <= found.high <= 1
    assert found.low < found.high


def hits(share: Share) -> tuple[int, int]:
    return share.hits, share.count


def test_figure_1() -> None:
    found = diagnosis()
    assert [hits(b.true) for b in found.figure1a] == [
        (1, 1), (0, 1), (0, 1), (0, 1), (0, 0), (1, 2), (0, 1), (0, 0), (0, 0), (2, 3),
    ]  # fmt: skip
    assert found.figure1a[5].mean == pytest.approx(0.525)
    assert found.figure1a[4].mean is None
    assert (found.figure1a[9].low, found.figure1a[9].high) == (0.9, 1.0)
    cells = {(a, b): n for a, row in enumerate(found.figure1b) for b, n in enumerate(row) if n}
    assert cells == {(9, 7): 1, (6, 9): 1, (5, 9): 1, (3, 9): 1, (2, 9): 1, (1, 2): 1}


def test_table_7() -> None:
    cells = {(c.drafter, c.target): c for c in diagnosis().table7}
    assert len(cells) == 16
    unsure = cells["< 0.5", ">= 0.9"]
    assert (hits(unsure.pool), hits(unsure.recovered)) == ((2, 6), (2, 2))
    assert unsure.change_recovered == pytest.approx((0.2 + 0.4) / 2)
    assert unsure.change_unrecovered is None
    middle = cells["0.5-0.9", ">= 0.9"]
    assert (hits(middle.pool), hits(middle.recovered)) == ((2, 6), (1, 2))
    assert (middle.change_recovered, middle.change_unrecovered) == pytest.approx((0.1, -0.2))
    assert hits(cells[">= 0.9", "0.5-0.9"].pool) == (1, 6)
    assert hits(cells["< 0.5", "< 0.5"].recovered) == (0, 1)
    assert hits(cells["< 0.5", "0.5-0.9"].recovered) == (0, 0)
    whole = cells[ALL, ALL]
    assert (hits(whole.pool), hits(whole.recovered)) == ((6, 6), (3, 6))
    assert whole.change_recovered == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert whole.change_unrecovered == pytest.approx((-0.1 - 0.2 - 0.05) / 3)


def test_what_level_1_breaks_and_cannot_know() -> None:
    found = diagnosis()
    assert {name: hits(share) for name, share in found.broken.items()} == {
        "< 0.5": (0, 1),
        "0.5-0.9": (0, 1),
        ">= 0.9": (1, 2),
        ALL: (1, 4),
    }
    assert hits(found.unknown) == (2, 6)
    assert hits(found.duplicates) == (6, 8)
    assert hits(found.raised) == (3, 6)


def test_depths_and_calibration() -> None:
    found = diagnosis()
    assert [(d.depth, *hits(d.refined)) for d in found.depths] == [(1, 0, 2), (2, 1, 1), (3, 0, 0), (4, 0, 1)]
    shown = {
        name: {b: hits(part[b].true) for b in range(10) if part[b].true.count}
        for name, part in found.calibration.items()
    }
    assert shown == {ALL: {0: (0, 1), 4: (1, 2), 9: (3, 4)}, "refined": {0: (0, 1), 4: (1, 1), 9: (0, 1)}}


probabilities = st.floats(0, 1)
positions = st.builds(Position, *[probabilities] * 3, *[st.booleans()] * 3)


@given(st.lists(positions, min_size=1, max_size=40))
def test_every_position_counts_once(rows) -> None:
    found = diagnosis(rows)
    rejected = sum(not p.right0 for p in rows)
    parts = [c for c in found.table7 if ALL not in (c.drafter, c.target)]
    whole = next(c for c in found.table7 if c.drafter == c.target == ALL)
    assert sum(b.true.count for b in found.figure1a) == len(rows)
    assert sum(map(sum, found.figure1b)) == sum(c.pool.hits for c in parts) == whole.pool.count == rejected
    assert sum(c.recovered.hits for c in parts) == whole.recovered.hits == sum(p.right1 and not p.right0 for p in rows)
    assert found.broken[ALL].count + rejected == len(rows)


def test_bins_hold_both_ends() -> None:
    found = bins(np.array([0.0, 0.1, 0.3, 0.7, 1.0]), np.array([True] * 5))
    assert [b.true.count for b in found] == [1, 1, 0, 1, 0, 0, 0, 1, 0, 1]


def test_tables_say_shares_intervals_and_counts() -> None:
    text = markdown(diagnosis())
    assert "of 6 rejected tokens" in text
    unsure = ("0.0 [0.0, 79.3] (16.7)", "- (0.0)", "100.0 [34.2, 100.0] (33.3)", "66.7 [20.8, 93.9] (50.0)")
    assert f"| < 0.5 | {' | '.join(unsure)} |" in text
    assert "| 0.5-0.9 | - / - | - / - | +0.100 / -0.200 | +0.100 / -0.200 |" in text
    assert "| refined offers that repeat a level-0 child | 75.0 [40.9, 92.9] | 8 |" in text
    assert len(rich_tables(diagnosis())) == 4


@pytest.mark.parametrize(("rows", "nodes"), [(POSITIONS, NODES), (POSITIONS[:1], [(0.3, False, 1, 0)])])
def test_figures_are_whole_files_and_repeatable(rows, nodes, tmp_path: Path) -> None:
    found = diagnosis(rows, nodes)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for figure_name, figure in plots.draw(found, "pr, 3 prompts").items():
            plots.save(figure, tmp_path / name, figure_name)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    names = ("figure1a", "figure1b", "depths", "calibration")
    assert files == sorted(f"{name}.{kind}" for name in names for kind in ("png", "svg"))
    for file in files:
        content = (tmp_path / "a" / file).read_bytes()
        assert content == (tmp_path / "b" / file).read_bytes()
        assert content.startswith(b"\x89PNG" if file.endswith("png") else b"<?xml")


def test_figures_show_the_numbers() -> None:
    figures = plots.draw(diagnosis(), "pr, 3 prompts")
    axes = figures["figure1a"].axes[0]
    assert [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)] == pytest.approx(
        [100, 0, 0, 0, 50, 0, 200 / 3]
    )
    assert axes.get_xticklabels()[9].get_text() == "0.9-1.0\n3"
    assert "10 in all" in axes.get_xlabel()
    boxes = [text.get_text() for text in figures["figure1b"].axes[0].texts]
    assert sorted(boxes) == sorted(["16.7%", "0.0%", "33.3%", "0.0%", "0.0%", "33.3%", "0.0%", "16.7%", "0.0%"])
    assert [label.get_text() for label in figures["depths"].axes[1].get_xticklabels()][:2] == ["1\n2", "2\n1"]
    assert figures["calibration"].axes[0].get_xticklabels()[9].get_text() == "0.9-1.0\n4\n1"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fixed = tiny_workload(tmp_path, monkeypatch)
    return lambda name, *more: main([name, *fixed, *more])


def test_diagnose_agrees_with_eval(command, capsys) -> None:
    flags = ("--method", "pr", "--budget", "8", "--temperature", "1", "--batch-size", "3")
    assert command("eval", *flags, "--json", "eval.json") == 0
    assert command("diagnose", *flags, "--out", "found/here", "--json", "found.json") == 0
    out = capsys.readouterr().out
    assert "rejected tokens" in out
    assert "pr, B = 8, T = 1, 4 prompts of one, two" in out
    whole = json.loads(Path("eval.json").read_text())["rows"][-1]
    content = json.loads(Path("found.json").read_text())
    assert content == json.loads(Path("found/here/diagnosis.json").read_text())
    found = {entry["name"]: entry["value"] for entry in content["results"]}
    accepted = sum(d["refined"]["count"] for d in found["depths"])
    assert accepted == round((whole["acceptance_length"] - 1) * whole["num_cycles"])
    assert sum(b["true"]["hits"] for b in found["calibration"][ALL]) == accepted
    assert len(list(Path("found/here").iterdir())) == 10
    assert Path("found/here/table7.md").read_text().startswith("`secondguess")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method", "eagle3.1"], "eagle3.1 reconsiders nothing"),
        (["--method", "pr:m=0"], "pr:m=0 reconsiders nothing"),
        (["--method", "ar"], "nothing to replay"),
        (["--method", "pr,pr:m=1"], "one method, budget and temperature at a time"),
        (["--temperature", "0,1"], "one method, budget and temperature at a time"),
        (["--out", "one.jsonl"], "one.jsonl is a file"),
        (["--drafter", "drafters/eagle3.1"], "no self-query"),
        (["--max-new-tokens", "1"], "nothing was drafted"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags, said, command, capsys) -> None:
    assert command("diagnose", "--out", "found", *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("secondguess: ")
    assert said in err


def test_without_matplotlib_the_way_to_get_it_is_named(command, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command_module, "find_spec", lambda name: None)
    assert command("diagnose", "--out", "found") == 2
    assert install("plots") in capsys.readouterr().err
    assert not Path("found").exists()
