"""Reproduction: the paper's numbers, cells that share measurements, estimates by hand, contradictions, the report."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secondguess.bench.diagnosis import ALL, BUCKETS
from secondguess.bench.paper import AVERAGE, PAPER, TASK_OF
from secondguess.bench.tasks import ORDER, TaskPrompt
from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.methods import parse_method
from secondguess.reproduce.arms import ARMS, parse_arms
from secondguess.reproduce.cells import MIN_UNITS, At, Cell, Measurement, Place, teams
from secondguess.reproduce.check import agrees, sample
from secondguess.reproduce.costs import costs_chapter
from secondguess.reproduce.estimate import Value, diagnosed, estimate
from secondguess.reproduce.explanations import explained, read_explanations
from secondguess.reproduce.html import html
from secondguess.reproduce.layout import Grid, Report, chapters, summary
from secondguess.reproduce.markdown import markdown
from secondguess.reproduce.outcome import YET, Outcome, contradiction, outcomes, published
from secondguess.reproduce.parts import Scope
from secondguess.reproduce.plan import distinct, jobs_of, measured_costs, words
from secondguess.reproduce.prose import differences, headline, recovery, tally
from secondguess.reproduce.records import LIVE_COLUMNS, REPLAY_COLUMNS, Record
from secondguess.reproduce.tables import BUILDERS, cells_of
from secondguess.reproduce.world import World

WHOLE = Scope(dict.fromkeys(ORDER, 100), {}, {})
PAIRS = {  # rows that gain over others, with the columns of tables that print averages
    "table1": ("PR", "EAGLE-3.1"),
    "table3": ("PR", "EAGLE-3.1"),
    "table4": ("+ advance 3 more", "EAGLE-3.1"),
    "table6": ("HASS + PR", "HASS"),
}


# ---- the paper


@pytest.mark.parametrize("table", PAIRS)
def test_the_papers_averages_are_those_of_its_columns(table: str) -> None:
    numbers = PAPER[table].numbers
    for row, _, quantity in numbers:
        if not quantity.endswith(" gain"):
            each = [v for (r, column, q), v in numbers.items() if (r, q) == (row, quantity) and column != AVERAGE]
            assert numbers[row, AVERAGE, quantity] == pytest.approx(mean(each), abs=0.0101), (row, quantity)


def test_the_papers_gains_are_those_of_its_rows() -> None:
    numbers = PAPER["table1"].numbers
    for column in (*TASK_OF, AVERAGE):
        for quantity in ("tau", "speedup"):
            ratio = numbers["PR", column, quantity] / numbers["EAGLE-3.1", column, quantity]
            assert numbers["PR over EAGLE-3.1", column, f"{quantity} gain"] == pytest.approx(ratio - 1, abs=6e-4)
    assert len(numbers) == 3 * 8 * 2


def test_numbers_that_the_paper_says_in_words() -> None:
    controls = PAPER["table4"].numbers
    for row, gain in (("+ advance 3 more", 0.017), ("widen to B_w = 9", 0.010)):
        assert controls[f"{row} over EAGLE-3.1", AVERAGE, "tau gain"] == pytest.approx(gain, abs=6e-4)
    costs = PAPER["table9"].numbers
    for column in ("B = 24", "B = 48"):
        ratio = costs["PR", column, "cycle ms"] / costs["EAGLE-3.1", column, "cycle ms"]
        assert costs["PR / EAGLE-3.1", column, "cycle ratio"] == pytest.approx(ratio, abs=6e-4)
        assert costs["3 serial passes a draft", column, "bound"] == (8 + 3) / 8


def test_table_7_adds_up() -> None:
    pool = {key[:2]: v for key, v in PAPER["table7"].numbers.items() if key[2] == "pool"}
    for row in dict.fromkeys(row for row, _ in pool):
        parts = [v for (r, column), v in pool.items() if r == row and column != "target all"]
        assert pool[row, "target all"] == pytest.approx(sum(parts), abs=1.1e-3)
    assert pool["drafter all", "target all"] == 1


# ---- cells


def test_every_number_of_the_paper_has_a_cell() -> None:
    found = published(cells_of("all", WHOLE))
    assert len(found) == sum(len(table.numbers) for table in PAPER.values())
    place = next(p for p in found if p[2:] == ("PR", "GSM8K", "tau") and p.table == "table1")
    assert (place.part, found[place]) == ("B = 24, T = 0", 4.73)
    assert BUILDERS.keys() == PAPER.keys()


def test_cells_stand_in_different_places_and_can_all_be_measured() -> None:
    cells = cells_of("all", WHOLE)
    assert len({cell.place for cell in cells}) == len(cells)
    for cell in cells:
        assert bool(cell.ours) + bool(cell.why) + (cell.known is not None) == 1, cell.place
        for m in cell.measurements:
            parse_method(m.variant.method, TreeConfig(budget=m.at.budget))


def test_tables_share_measurements() -> None:
    def asked(table: str, row: str, column: str, quantity: str) -> tuple[Measurement, ...]:
        [cell] = [
            cell
            for cell in cells_of(table, WHOLE)
            if cell.place[2:] == (row, column, quantity) and "48" in cell.place.part + cell.place.row
            and "T = 0" in cell.place.part and "at" not in cell.place.part
        ]  # fmt: skip
        return cell.ours

    tau = asked("table1", "EAGLE-3.1", "GSM8K", "tau")
    assert tau == asked("table3", "EAGLE-3.1", "GSM8K", "tau") == asked("table5", "B = 48", "EAGLE-3.1", "tau")
    speed = asked("table1", "PR", "LCB", "speedup")
    assert speed == asked("table2", "LCB, PR", "n = 1", "speedup") == asked("table3", "PR", "LCB", "speedup")
    everything = cells_of("all", WHOLE)
    alone = sum(len(distinct(cells_of(table, WHOLE))) for table in PAPER)
    assert len(distinct(everything)) < alone


def test_times_that_are_divided_by_each_other_are_a_team() -> None:
    found = teams(cells_of("table9", WHOLE))
    assert sorted(len(team) for team in found) == [4, 4]  # a team per budget
    assert all(len({m.at for m in team}) == 1 for team in found)
    cells = cells_of("all", WHOLE)
    assert sorted(map(str, (m for team in teams(cells) for m in team))) == sorted(map(str, distinct(cells)))
    assert all(len(team) == 1 for team in teams(cells) if team[0].kind != "live")


def test_what_is_no_graph_is_not_timed_beside_graphs() -> None:
    cells = cells_of("table9", replace(WHOLE, drafts_as_graphs=True))
    whys = {cell.place.row: cell.why for cell in cells if cell.place.quantity in ("cycle ms", "cycle ratio")}
    assert {row for row, why in whys.items() if why} == {"PR, 3 a draft", "PR, 3 a draft / EAGLE-3.1"}
    assert "reconsider_cap=3 cannot be drafted as a CUDA graph" in whys["PR, 3 a draft"]


@pytest.mark.parametrize(("size", "count"), [(1, 8), (2, 10), (4, 20), (8, 24), (16, 16)])
def test_batches_are_enough_for_an_interval_as_far_as_prompts_reach(size: int, count: int) -> None:
    rows = {"gsm8k": [TaskPrompt("gsm8k", str(i), ("How many?",)) for i in range(30)]}
    flags = Namespace(limit=60, live_limit=8, seed=0)
    world = World(flags, {}, None, None, {}, {}, rows, {})  # type: ignore[arg-type]
    assert len(world.prompts(Measurement("live", ARMS["pr"], ("gsm8k",), At(48, 0.0, size)))) == count
    assert len(world.prompts(Measurement("replay", ARMS["pr"], ("gsm8k",), At(48, 0.0)))) == 30


def test_jobs_take_every_measurement_once_and_share_texts() -> None:
    asked = distinct(cells_of("all", WHOLE))
    jobs = jobs_of(asked)
    assert sorted(map(str, (m for job in jobs for m in job.measurements))) == sorted(map(str, asked))
    for job in jobs:
        shared = {(m.kind, m.tasks, m.at.temperature, m.at.batch_size) for m in job.measurements}
        assert shared == {(job.kind, job.tasks, job.temperature, job.batch_size)}
    assert len(jobs) == len({(j.kind, j.tasks, j.temperature, j.batch_size) for j in jobs})
    kinds = [job.kind for job in jobs]
    assert kinds == sorted(kinds, key=("replay", "diagnosis", "live").index)


def test_what_is_lacking_is_said_and_averages_go_on_without_it() -> None:
    scope = Scope({"gsm8k": 5, "mbpp": 50}, {t: f"no {t}" for t in ORDER}, {"hass": "no hass", "no-balance": "no arm"})
    cells = {cell.place: cell for cell in cells_of("all", scope)}
    at = {place[:1] + place[2:]: cell for place, cell in cells.items() if "B = 48" in place.part}
    assert at["table3", "PR", "LCB", "tau"].why == "no livecodebench"
    assert [m.tasks for m in at["table3", "PR", AVERAGE, "tau"].ours] == [("gsm8k",), ("mbpp",)]
    assert at["table3", "PR, no balance term", "GSM8K", "tau"].why == "no arm"
    assert at["table6", "HASS + PR over HASS", "GSM8K", "tau gain"].why == "no hass"
    assert at["table6", "HASS + PR", "GSM8K", "tau"].ours
    assert at["table2", "GSM8K, PR", "n = 4", "speedup"].ours
    assert at["table2", "GSM8K, PR", "n = 8", "speedup"].why == "there are not 8 prompts to decode together"


def test_budgets_and_temperatures_in_place_of_the_papers() -> None:
    cells = cells_of("all", replace(WHOLE, budgets=(8,), temperatures=(0.0, 1.0)))
    assert {m.at.budget for m in distinct(cells)} == {8}
    assert {m.at.temperature for m in distinct(cells)} == {0.0, 1.0}
    found = published(cells_of("table4", replace(WHOLE, budgets=(8,))))
    assert {place.part for place in found} == {"B = 8, T = 1"}  # beside the only part that there is


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["pr"], "give NAME=FOLDER"),
        (["pr="], "give NAME=FOLDER"),
        (["has=x"], "unknown name; did you mean hass?"),
        (["pr=a", "pr=b"], "--arm pr is given twice"),
    ],
)
def test_arms_that_are_refused(texts, said) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        parse_arms(texts)


def test_arms_with_equals_signs_in_their_folders() -> None:
    assert {name: str(folder) for name, folder in parse_arms(["hass+pr=a=b"]).items()} == {"hass+pr": "a=b"}


# ---- estimates


def replayed(*units: tuple[int, int, int]) -> Record:
    return Record(2.0, sum(u[1] for u in units), REPLAY_COLUMNS, [[row, *u] for row, u in enumerate(units)])


def test_estimates_equal_hand_computed_ones() -> None:
    ours = [replayed((0, 30, 10), (0, 10, 10), (1, 90, 10)), replayed((0, 8, 2))]
    theirs = [replayed((0, 20, 10), (0, 20, 20), (1, 10, 10)), replayed((0, 4, 2))]
    tau = estimate("tau", ours, ())
    assert tau is not None
    assert (tau.value, tau.low, tau.high, tau.num_units, tau.num_tasks) == (3.0, None, None, 3, 2)
    assert tau.with_loops == pytest.approx((130 / 30 + 4) / 2)
    gain = estimate("tau gain", ours, theirs)
    assert gain is not None
    assert gain.value == pytest.approx(3.0 / ((40 / 30 + 2) / 2) - 1)


def test_times_equal_hand_computed_ones() -> None:
    ours = [Record(1.0, 30, LIVE_COLUMNS, [[0, 0, 20, 1.0, 20, 3.0, 8], [1, 0, 10, 0.5, 10, 1.5, 4]])]
    theirs = [Record(1.0, 30, LIVE_COLUMNS, [[0, 0, 20, 2.0, 20, 3.0, 10], [1, 0, 10, 1.0, 10, 1.5, 5]])]
    for quantity, expected in (("speedup", 3.0), ("cycle ms", 125.0)):
        found = estimate(quantity, ours, ())
        assert found is not None
        assert found.value == pytest.approx(expected)
    gain, ratio = estimate("speedup gain", ours, theirs), estimate("cycle ratio", ours, theirs)
    assert gain is not None
    assert ratio is not None
    assert (gain.value, ratio.value) == pytest.approx((1.0, 125 / 200))


def test_a_task_whose_texts_all_loop_is_left_out() -> None:
    found = estimate("tau", [replayed((1, 90, 10)), replayed((0, 8, 2))], ())
    assert found == Value(4.0, None, None, 1, 1, 6.5)
    assert estimate("tau", [replayed((1, 90, 10))], ()) is None
    assert estimate("tau", [replayed((0, 0, 0))], ()) is None


units = st.lists(st.tuples(st.just(0), st.integers(10, 40), st.integers(5, 10)), min_size=MIN_UNITS, max_size=12)


def test_an_average_over_a_few_prompts_of_many_tasks_has_no_interval() -> None:
    four, six = (replayed(*((0, 20 + i, 10) for i in range(n))) for n in (4, 6))
    few, enough = estimate("tau", [four, replayed((0, 20, 10)), four], ()), estimate("tau", [four, six], ())
    assert few is not None
    assert enough is not None
    assert (few.num_units, few.low) == (9, None)
    assert enough.low is not None


def test_turns_of_a_conversation_are_drawn_together() -> None:
    turns = [[i // 2, 0, 10 + 10 * (i % 2), 10] for i in range(2 * MIN_UNITS)]  # all conversations are alike
    together = estimate("tau", [Record(1.0, 1, REPLAY_COLUMNS, turns)], ())
    apart = estimate("tau", [Record(1.0, 1, REPLAY_COLUMNS, [[i, *turn[1:]] for i, turn in enumerate(turns)])], ())
    assert together is not None
    assert apart is not None
    assert (together.num_units, together.low, together.high) == (MIN_UNITS, 1.5, 1.5)
    assert apart.num_units == 2 * MIN_UNITS
    assert apart.low is not None
    assert apart.low < 1.5
    few = estimate("tau", [Record(1.0, 1, REPLAY_COLUMNS, turns[2:])], ())
    assert few is not None
    assert (few.num_units, few.low) == (MIN_UNITS - 1, None)


@given(units)
def test_intervals_hold_their_numbers(rows) -> None:
    found = estimate("tau", [replayed(*rows)], ())
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    each = [emitted / cycles for _, emitted, cycles in rows]
    assert min(each) - 1e-9 <= found.low <= found.high <= max(each) + 1e-9
    same = estimate("tau gain", [replayed(*rows)], [replayed(*rows)])
    assert same is not None
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_shares_of_a_diagnosis_are_found_by_place() -> None:
    bucket = ("< 0.5", ">= 0.9")
    share = {"share": 0.25, "low": 0.2, "high": 0.3, "hits": 1, "count": 4}
    none = dict.fromkeys(share) | {"hits": 0, "count": 0}
    change = {"change_recovered": 0.3, "change_unrecovered": None}
    found = {
        "figure1a": [{"low": b / 10, "high": (b + 1) / 10, "true": share if b == 9 else none} for b in range(10)],
        "table7": [
            {"drafter": d, "target": t, "pool": share if (d, t) == bucket else none, "recovered": none}
            | (change if (d, t) == bucket else dict.fromkeys(change))
            for d in ("< 0.5", "0.5-0.9", ">= 0.9", "all")
            for t in ("< 0.5", "0.5-0.9", ">= 0.9", "all")
        ],
    }
    cells = cells_of("figure1", WHOLE) + cells_of("table7", WHOLE)
    there = {cell.place[2:] for cell in cells if diagnosed(cell.place, found)}
    assert there == {
        ("drafter 0.9-1.0", "accepted", "share"),
        ("drafter < 0.5, target >= 0.9", "rejected", "share"),
        ("drafter < 0.5", "target >= 0.9", "pool"),
        ("drafter < 0.5", "target >= 0.9", "change recovered"),
    }


def test_one_diagnosis_serves_all_budgets() -> None:
    scope = replace(WHOLE, budgets=(8, 48, 24), temperatures=(0.0, 1.0))
    asked = distinct([*cells_of("table7", scope), *cells_of("figure1", scope)])
    assert [(m.kind, m.at) for m in asked] == [("diagnosis", At(48, 0.0)), ("diagnosis", At(48, 1.0))]


def test_costs_come_from_what_was_measured() -> None:
    replay, live = (Measurement(kind, ARMS["pr"], ("gsm8k",), At(48, 0.0)) for kind in ("replay", "live"))
    records = {
        replay: Record(2.0, 40, REPLAY_COLUMNS, [[0, 0, 40, 20]]),
        live: Record(6.0, 60, LIVE_COLUMNS, [[0, 0, 60, 5.0, 50, 10.0, 30]]),
    }
    costs = measured_costs(records)
    assert costs is not None
    assert (costs.plain, costs.replay, costs.live) == (0.2, 0.05, 0.1)
    assert measured_costs({replay: records[replay]}) is None
    assert [words(s) for s in (5, 89, 90, 5399, 7200)] == ["5 s", "89 s", "2 min", "90 min", "2.0 h"]


# ---- contradictions


@pytest.mark.parametrize(
    ("quantity", "low", "high", "paper", "said"),
    [
        ("tau gain", -0.03, -0.01, 0.07, "the sign differs"),
        ("tau gain", 0.01, 0.03, -0.009, "the sign differs"),
        ("tau gain", -0.03, 0.01, 0.07, "outside"),  # at most a seventh of it
        ("tau gain", -0.03, 0.04, 0.07, ""),
        ("tau gain", 0.15, 0.20, 0.07, "outside"),
        ("tau gain", 0.13, 0.20, 0.07, ""),
        ("tau gain", -0.012, -0.005, -0.009, ""),
        ("tau gain", -0.05, -0.02, -0.009, "outside"),
        ("cycle ratio", 1.05, 1.09, 1.022, "outside"),
        ("cycle ratio", 1.00, 1.02, 1.022, ""),
        ("recovered", 0.06, 0.09, 0.285, "outside"),
        ("tau", 1.0, 1.1, 4.7, ""),  # another model's
        ("tau gain", None, None, 0.07, ""),
        ("tau gain", 0.2, 0.3, None, ""),
    ],
)
def test_contradictions(quantity, low, high, paper, said) -> None:
    found = contradiction(quantity, Value(0.0, low, high, 9), paper)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def planted() -> list[Outcome]:
    """Table 1 at B = 24 and T = 0 on one task, where PR loses a tenth of its tokens to EAGLE-3.1."""
    scope = Scope({"gsm8k": 60}, {t: f"no {t}" for t in ORDER}, {}, (24,), (0.0,))
    cells = cells_of("table1", scope)
    rng = random.Random(0)
    base = [(0, rng.randrange(190, 210), 100) for _ in range(40)]
    worse = [(0, emitted - 20, cycles) for _, emitted, cycles in base]
    rows = {"pr": worse, "eagle3.1": base}
    return outcomes(cells, {m: replayed(*rows[m.variant.drafter]) for m in distinct(cells) if m.kind == "replay"})


def test_a_planted_contradiction_is_found_and_explained() -> None:
    found = planted()
    differing = {o.cell.place[2:]: o.differs for o in found if o.differs}
    assert differing == {
        ("PR over EAGLE-3.1", "GSM8K", "tau gain"): "the sign differs",
        ("PR over EAGLE-3.1", AVERAGE, "tau gain"): "the sign differs",
    }
    assert any(o.why == YET for o in found)
    notes = differences(found)
    assert notes[0].startswith("Table 1, B = 24, T = 0: PR over EAGLE-3.1, GSM8K, tau gain: here -10.")
    assert notes[0].endswith("paper +7.3%: the sign differs. No explanation is given.")
    assert "the sign differs. Also held different: average over 1 of 7 tasks. No" in notes[1]
    assert "2 contradict it" in tally(found)
    assert headline(found).startswith("PR over EAGLE-3.1, averages over tasks: tau -10.")
    assert recovery(found) == ""


def test_explanations_stand_beside_what_differs(tmp_path: Path) -> None:
    path, found = tmp_path / "why.txt", planted()
    path.write_text("# a comment\n\ntable1: too few data.\ntable1 | PR over EAGLE-3.1 | GSM8K: it counts badly.\n")
    told = explained(found, read_explanations(path, [o.cell.place for o in found]))
    assert [note.partition("differs. ")[2] for note in differences(told)] == [
        "it counts badly.",
        "Also held different: average over 1 of 7 tasks. too few data.",
    ]
    assert {o.explanation for o in told if not o.differs} == {""}
    assert "; it counts badly." in html(Report("T", "", [], chapters(told, {}), [], ""), tmp_path)


@pytest.mark.parametrize("line", ["table1 | PR over EAGEL-3.1: words", "table1", "table1:"])
def test_explanations_of_nothing_are_errors(line: str, tmp_path: Path) -> None:
    path = tmp_path / "why.txt"
    path.write_text(f"table1: words\n{line}\n")
    with pytest.raises(UserError, match=r"why\.txt:2: no such cell"):
        read_explanations(path, [cell.place for cell in cells_of("table1", WHOLE)])


def test_what_needs_no_measuring_says_what_it_is() -> None:
    found = outcomes(cells_of("table8", WHOLE) + cells_of("table9", WHOLE), {})
    assert {o.state for o in found if o.cell.place.quantity == "count"} == {"found"}
    assert {o.state for o in found if o.cell.place.quantity == "bound"} == {"computed"}
    assert tally(found).startswith("25 cells: 4 computed, 7 found, 14 not measured.")


def test_a_failed_measurement_is_why_there_is_no_number() -> None:
    cells = cells_of("table7", WHOLE)
    found = outcomes(cells, dict.fromkeys(distinct(cells), Record(0.0, 0, complaints=("nothing was drafted",))))
    assert {o.why for o in found} == {"nothing was drafted"}


def test_a_chapter_of_what_a_gpu_costs(tmp_path: Path) -> None:
    def row(method, budget, n, ms, speed):
        return {"method": method, "budget": budget, "num_requests": n, "cycle_ms": ms, "tokens_per_second": speed}

    rows = [row("ar", 0, 1, 10.0, 50.0), row("eagle3.1", 48, 1, 20.0, 100.0), row("pr", 48, 1, 21.0, 110.0)]
    rows += [row("pr, serial", 48, 1, 30.0, 80.0)]
    path = tmp_path / "result.json"
    record = {"revision": "abc", "machine": {"gpus": ["H200"]}}
    path.write_text(json.dumps({"record": record, "Qwen3-8B": rows, "Llama-3.1-8B": rows}))
    made = costs_chapter(path)
    assert made.about.startswith("Tables 9 and 2 on H200, revision abc:")
    llama9, llama2, qwen9, qwen2 = (shown_lines(grid) for grid in made.grids)
    ours = ["EAGLE-3.1 here 20.0 ms 1.000", "PR here 21.0 ms 1.050", "PR, in series here 30.0 ms 1.500"]
    assert llama9 == ours
    assert qwen9 == [ours[0], "EAGLE-3.1 paper 26.0 ms", ours[1], "PR paper 26.6 ms 1.022", ours[2]]
    assert llama2[:2] == ["EAGLE-3.1 here 2.00x", "GSM8K, EAGLE-3.1 paper 2.05x"]
    assert qwen2 == ["EAGLE-3.1 here 2.00x", "PR here 2.20x"]
    assert costs_chapter(None).about.startswith("not measured: needs a GPU")
    path.write_text("{}")
    with pytest.raises(UserError, match=r"is no result\.json of scripts/gpu_check\.sh"):
        costs_chapter(path)


def shown_lines(grid: Grid) -> list[str]:
    return [
        " ".join([line.label, line.source, *(n.text for field in line.fields for n in field)]) for line in grid.lines
    ]


def test_what_second_looks_recover_is_said() -> None:
    cells = cells_of("table7", WHOLE)
    share = {"share": 0.0768, "low": 0.0622, "high": 0.0944, "hits": 80, "count": 1042}
    buckets = {(d, t) for d in (*BUCKETS, ALL) for t in (*BUCKETS, ALL)}
    none = {"change_recovered": None, "change_unrecovered": None}
    table = [{"drafter": d, "target": t, "pool": share, "recovered": share} | none for d, t in buckets]
    records = dict.fromkeys(distinct(cells), Record(1.0, 9, found={"table7": table}))
    said = "A second look gets 7.7% [6.2% to 9.4%] of the rejected tokens right (paper: 28.5%)."
    assert recovery(outcomes(cells, records)) == said


def test_a_planted_contradiction_is_highlighted(tmp_path) -> None:
    found = planted()
    parts = [summary(found), *chapters(found, {})]
    report = Report("T", "`made`", ["a < b"], [p for p in parts if p], differences(found), "Another target & machine.")
    page, text = html(report, tmp_path), markdown(report)
    assert page.count('<div class="differs"') == 3  # the average also in the summary
    assert 'title="measured on 40 prompts; -10.' in page
    assert 'title="not measured: no mbpp"' in page
    assert page.count("Another target &amp; machine.") == text.count("Another target & machine.") == 1
    assert '<a href="#note1">(1)</a>' in page
    assert '<li id="note1">Table 1' in page
    assert "a &lt; b" in page
    assert (text.count("** (1)"), text.count("** (2)")) == (1, 2)
    assert "\n1. Table 1, B = 24" in text
    averages, paper_row = [line for line in text.splitlines() if line.startswith("| EAGLE-3.1 | paper |")]
    assert averages == "| EAGLE-3.1 | paper | 4.74 / 2.04x |"
    assert paper_row.startswith("| EAGLE-3.1 | paper | 4.41 / 1.90x | 4.70 / 2.14x |")
    assert "- `-` not measured: no mbpp" in text


# ---- checking


def outcome(kind, low, high, column="c") -> Outcome:
    cell = Cell(Place("t", "p", "r", column, "tau"), (Measurement(kind, ARMS["pr"], ("gsm8k",), At(48, 0.0)),))
    return Outcome(cell, Value(1.0, low, high, 9), "", None)


def test_a_tenth_of_what_can_be_checked_is_sampled() -> None:
    found = [outcome("replay", None, None)] * 10 + [outcome("live", None, None)] * 50 + [outcome("live", 0.9, 1.1)] * 20
    found += [outcome("replay", 0.9, 1.1, AVERAGE)] * 100
    chosen = sample(found, 1)
    assert len(chosen) == 3
    assert [o.cell.ours[0].kind for o in chosen].count("live") == 2
    assert all(o.cell.ours[0].kind == "replay" or o.value.low for o in chosen)  # type: ignore[union-attr]
    assert all(o.cell.place.column != AVERAGE for o in chosen)
    assert sample(found, 1) == chosen
    with pytest.raises(UserError, match="nothing to check"):
        sample([outcome("live", None, None)], 0)


def test_either_kind_makes_up_for_the_other() -> None:
    times, shares = [outcome("live", 0.9, 1.1)], [outcome("replay", 0.9, 1.1)]
    kinds = [
        [o.cell.ours[0].kind for o in sample(found, 0)] for found in (times + shares, times * 9 + shares * 31, times)
    ]
    assert kinds == [["live", "replay"], ["live", "live", "replay", "replay"], ["live"]]


def test_agreement() -> None:
    assert agrees(Value(1.0, 0.9, 1.1, 9), Value(1.1, 0, 0, 9))
    assert not agrees(Value(1.0, 0.9, 1.1, 9), Value(1.2, 0, 0, 9))
    assert agrees(Value(1.0, None, None, 2), Value(1.0, None, None, 2))
    assert not agrees(Value(1.0, None, None, 2), Value(1.01, None, None, 2))
    assert not agrees(Value(1.0, 0.9, 1.1, 9), None)
