"""Training: data, configuration, runs that go on bit for bit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace

import pytest
import torch

from secondguess.capture.run import capture, fill, plan_capture
from secondguess.capture.source import Live
from secondguess.errors import UserError
from secondguess.testing import tiny_target
from secondguess.train.config import TrainConfig, dump_config, list_settings, load_config
from secondguess.train.data import Response, batches, read_responses, split_held_out
from secondguess.train.plan import Plan
from secondguess.train.trainer import Trainer
from tiny_run import float32_target, log_without_times, tiny_config, tiny_run

# -- data and configuration ------------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_epoch_alone() -> None:
    indices = list(range(10, 31))
    first = list(batches(indices, 4, seed=3, epoch=2))
    assert first == list(batches(indices, 4, seed=3, epoch=2))
    assert first != list(batches(indices, 4, seed=3, epoch=1))
    flat = [i for batch in first for i in batch]
    assert len(flat) == len(set(flat)) == 20  # the odd one waits for another epoch


def test_held_out_split_is_stable_when_data_is_added() -> None:
    responses = [Response(f"r{i}", (1, 2, 3), 1) for i in range(400)]
    _, held_out = split_held_out(responses, 0.1)
    _, more = split_held_out([*responses, *(Response(f"s{i}", (1, 2, 3), 1) for i in range(100))], 0.1)
    assert held_out == [i for i in more if i < 400]
    assert 20 < len(held_out) < 60


def test_what_prepare_answers_first_is_not_held_out_first() -> None:
    ids = sorted((f"r{i}" for i in range(400)), key=lambda id_: hashlib.sha256(id_.encode()).digest())
    _, held_out = split_held_out([Response(id_, (1, 2, 3), 1) for id_ in ids[:100]], 0.1)
    assert 2 < len(held_out) < 25


def test_turns_of_a_conversation_are_held_out_together() -> None:
    turns = [Response(f"c{i}{turn}", (1, 2, 3), 1) for i in range(200) for turn in ("", "#2", "#3")]
    _, held_out = split_held_out(turns, 0.1)
    assert 3 < len(held_out) < 300
    conversations = {turns[i].id.split("#")[0] for i in held_out}
    assert len(held_out) == 3 * len(conversations)


def test_a_number_that_is_no_later_turn_is_part_of_an_id() -> None:
    issues = [Response(f"repo#{n}/#1", (1, 2, 3), 1) for n in range(200)]
    assert 3 < len(split_held_out(issues, 0.1)[1]) < 100


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "not a response row"),
        ('{"id": "a", "prompt_len": 1}', "not a response row"),
        ('{"id": "a", "prompt_len": 3, "input_ids": [1, 2, 3]}', "leaves no answer"),
        ('{"id": "a", "prompt_len": 1, "input_ids": [1, 99]}', "outside the target's vocabulary"),
        ('{"id": "a", "prompt_len": 1, "input_ids": [1, "2"]}', "whole numbers"),
        ('{"id": "a", "prompt_len": 1, "input_ids": [1, 2.0]}', "whole numbers"),
        ('{"id": "a", "prompt_len": true, "input_ids": [1, 2]}', "whole numbers"),
        ("[" * 100_000, "not a response row"),
    ],
)
def test_broken_responses_name_the_line(tmp_path, line: str, match: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a", "prompt_len": 1, "input_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(UserError, match=f":2: .*{match}"):
        read_responses(path, 64)


def test_responses_are_split_at_line_feeds_only(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a\u2028b\x85", "prompt_len": 1, "input_ids": [1, 2, 3]}\n', encoding="utf-8")
    assert read_responses(path, 64) == [Response("a\u2028b\x85", (1, 2, 3), 1)]
    path.write_bytes(b"\x80\xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read_responses(path, 64)


def test_answers_of_one_token_are_left_out_and_counted(tmp_path) -> None:
    path, said = tmp_path / "r.jsonl", []
    rows = [
        {"id": "long", "prompt_len": 1, "input_ids": [1, 2, 3]},
        {"id": "short", "prompt_len": 2, "input_ids": [1, 2, 3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [r.id for r in read_responses(path, 64, said.append)] == ["long"]
    assert said == ["1 of 2 responses left out: answers of one token train nothing"]


def test_of_responses_with_one_id_the_first_counts(tmp_path) -> None:
    path, said = tmp_path / "r.jsonl", []
    rows = [{"id": f"r{i % 30}", "prompt_len": 1, "input_ids": [1, 2, i]} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses = read_responses(path, 64, said.append)
    assert said == ["10 of 40 responses left out: an earlier one has their id"]
    training, held_out = split_held_out(responses, 0.2)
    assert held_out
    assert sorted(training + held_out) == list(range(30))
    assert training == sorted(training)


def test_config_rejects_what_it_does_not_know(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("responses: r.jsonl\nout: runs/x\nlr: 1e-3\n")
    assert load_config(path, ["epochs=2", "method=eagle3.1"]).lr == 1e-3
    for override, match in [
        ("epoch=2", "did you mean epochs"),
        ("epochs=two", "whole number"),
        ("method=eagle", "one of eagle3.1, pr, hass, hass\\+pr, got 'eagle'; did you mean eagle3.1"),
        ("see_own_level0=maybe", "see_own_level0 must be true or false, got 'maybe'"),
        ("rho=2", r"in \[0, 1\]"),
        ("held_out=1", "held_out=1 leaves no response to train on"),
        ("epochs", "key=value"),
        ("lr=[1", "not YAML"),
        ("lr=[1]", "must be a number"),
        ("lr=-1", "lr must be above 0"),
        ("lr=nan", "lr must be above 0"),
        ("weight_decay=nan", "weight_decay must be 0 or more"),
    ]:
        with pytest.raises(UserError, match=match):
            load_config(path, [override])


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ("method=eagle3.1 rho=0.5 query_slot=own_token", "rho, query_slot would change nothing: eagle3.1 has no"),
        ("method=hass carry=all", "carry would change nothing: hass has no level 1"),
        ("method=hass+pr rho=0", r"rho must be above 0 for hass\+pr"),
        ("method=pr top_k=5", "top_k would change nothing: pr has no loss on the most probable tokens"),
        ("method=hass top_k=50 draft_vocab_size=32", r"top_k must be at most draft_vocab_size \(32\), got 50"),
        ("num_layers=9", "num_layers must be at most 8, got 9"),
        ("balance=hinge", "balance would change nothing: balance_weight is 0"),
        ("balance_weight=1 anchor_to=eagle3.1", "anchor_to would change nothing: balance is floor, not anchor"),
        (
            "balance=anchor balance_weight=1 anchor_to=eagle3.1 anchor_decay=0.5",
            "anchor_decay would change nothing: anchor_to names a drafter that stays as it is",
        ),
        ("balance=anchor balance_weight=1 parallel=shard", "take parallel=replicate"),
        ("anchor_decay=1.5", r"anchor_decay must be in \[0, 1\]"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(overrides: str, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load_config(None, ["responses=r", "out=o", *overrides.split()])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "who"),
    [
        ("", "level0"),
        ("method=hass+pr", "level0"),
        ("warm_start=eagle3.1", "level0"),
        ("carry=half", "both"),
        ("attach=0.5", "both"),
        ("balance_weight=0.1", "both"),
        ("parallel=shard", "both"),
        ("query_slot=own_token lens=false", "both"),
        ("query_slot=own_token", "level0"),
        ("shared_loss=both", "both"),
        ("method=eagle3.1", "both"),
        ("method=eagle3.1 parallel=shard", "both"),
        ("method=hass carry=half lens=false shared_loss=both", "both"),  # as files of earlier runs have it
    ],
)
def test_what_worked_before_there_were_better_defaults_works(overrides: str, who: str) -> None:
    config = load_config(None, ["responses=r", "out=o", *overrides.split()])
    assert config.taught_by == who
    assert config.decisive.get("shared_loss", "both") == who
    assert ("lens" in config.decisive) == config.recipe.level1
    again = {name: value for name, value in config.decisive.items() if name != "parallel" or value != "shard"}
    assert TrainConfig(**again).taught_by == who, "what auto came to says it as well"


def test_yaml_reads_off_as_false_but_carry_does_not() -> None:
    assert load_config(None, ["responses=r", "out=o", "carry=off"]).carry == "off"
    with pytest.raises(UserError, match="carry must be text, got True"):
        load_config(None, ["responses=r", "out=o", "carry=on"])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\xff\xfe\x80\x00binary", "cannot read|not YAML"),
        (b"a: [1", "not YAML"),
        (b"responses: r\nout: o\n1: 2\n", "unknown setting 1"),
        (b"- responses", "key: value lines"),
    ],
)
def test_broken_config_files_are_refused_in_one_line(tmp_path, content: bytes, match: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=match) as caught:
        load_config(path, [])
    assert "\n" not in str(caught.value)


def test_a_printed_config_reads_back(tmp_path) -> None:
    config = TrainConfig(responses="[r] \u2028: #.jsonl", out="1e-3", lr=1e-5, target="on")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml", []) == config


def test_settings_are_listed_with_choices_and_defaults() -> None:
    listed = list_settings()
    assert all(f"  {field.name} " in listed for field in fields(TrainConfig))
    assert "(half, merge, off, all); default: off" in listed


def test_the_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    """Ten steps, the first two of them to the peak."""
    config = TrainConfig(responses="-", out="-", lr=0.4, warmup=0.2, epochs=2, batch_size=4)
    plan = Plan(config, range(20))
    assert plan.num_steps == 10
    rates = [plan.learning_rate(step) for step in range(11)]
    assert rates[:3] == [0.2, 0.4, 0.4]
    assert rates[4] == pytest.approx(0.34142136)  # a quarter of the way: 0.2 (1 + cos 45 deg)
    assert rates[6] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(0.01522409)
    assert rates[10] == 0
    assert Plan(replace(config, warmup=0), range(20)).learning_rate(0) == 0.4


def test_tokens_of_prompts_alone_stay_out_of_the_draft_vocabulary(tmp_path) -> None:
    """Though they are the most frequent ones: the loss is on answers."""
    target = float32_target()
    responses = [Response(f"r{i}", (*[50, 51] * 20, *range(10, 42)), prompt_len=40) for i in range(24)]
    source = Live(target, [r.input_ids for r in responses])
    trainer = Trainer(tiny_config(tmp_path / "run"), target, responses, source)
    assert trainer.drafter.target_ids.tolist() == list(range(10, 42))
    assert trainer.coverage == 1


# -- runs ------------------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "eagle3.1"},
        {"method": "pr"},
        {"method": "pr", "batch_size": 2, "accumulate": 2},
        {"method": "hass+pr", "carry": "merge", "query_slot": "soft_pred"},
        {"method": "pr", "balance": "anchor", "balance_weight": 0.5, "anchor_decay": 0.9, "num_layers": 2},
    ],
)
def test_a_killed_run_continues_bit_for_bit(tmp_path, changes) -> None:
    whole = tiny_run(tmp_path, "whole", **changes)
    losses: dict[int, float] = {}
    whole.run(lambda step, loss: losses.__setitem__(step, loss))

    killed = tiny_run(tmp_path, "killed", **changes)

    def kill_at_7(step: int, loss: float) -> None:
        if step == 7:
            raise Killed

    with pytest.raises(Killed):
        killed.run(kill_at_7)
    resumed = tiny_run(tmp_path, "killed", **changes)
    assert resumed.step == 6
    again: dict[int, float] = {}
    resumed.run(lambda step, loss: again.__setitem__(step, loss))
    assert again == {step: loss for step, loss in losses.items() if step > 6}
    for name, parameter in whole.drafter.named_parameters():
        assert torch.equal(parameter, dict(resumed.drafter.named_parameters())[name]), name
    assert log_without_times(whole.folder) == log_without_times(resumed.folder)


def test_an_interrupt_between_steps_loses_nothing(tmp_path) -> None:
    def interrupt_at_2(step: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path, "run").run(interrupt_at_2)
    assert tiny_run(tmp_path, "run").step == 2


def test_training_learns(tmp_path) -> None:
    trainer = tiny_run(tmp_path, "learn", method="pr", lr=3e-3)
    before = trainer.evaluate()
    trainer.run()
    after = trainer.evaluate()
    assert after["loss0"][0] < before["loss0"][0]
    assert after["loss1"][0] < before["loss1"][0]


def test_a_folder_with_another_run_is_refused(tmp_path) -> None:
    tiny_run(tmp_path, "run", method="pr").run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="another lr"):
        tiny_run(tmp_path, "run", method="pr", lr=5e-4)
    with pytest.raises(UserError, match="another content of responses"):
        tiny_run(tmp_path, "run", data_seed=1, method="pr")
    with pytest.raises(UserError, match="another target weights"):
        tiny_run(tmp_path, "run", target_seed=1, method="pr")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "run" / "resume.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"resume\.pt is damaged"):
        tiny_run(tmp_path, "run", method="pr")


def test_a_file_in_the_way_of_a_folder_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be a folder"):
        tiny_run(tmp_path, "file/run")


def test_held_out_losses_of_level_0_compare_with_eagles(tmp_path) -> None:
    """Same weights, with and without level 1: evaluation carries nothing over."""
    pr, eagle = tiny_run(tmp_path, "pr", method="pr"), tiny_run(tmp_path, "eagle", method="eagle3.1")
    eagle.drafter.load_state_dict(pr.drafter.state_dict(), strict=False)
    assert pr.evaluate()["loss0"] == eagle.evaluate()["loss0"]


def test_weight_decay_spares_norms_and_query(tmp_path) -> None:
    trainer = tiny_run(tmp_path, "run", method="pr", weight_decay=0.1)
    spared = {id(p) for g in trainer.learner.optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    names = {name for name, p in trainer.drafter.named_parameters() if id(p) in spared}
    assert names == {name for name, _ in trainer.drafter.named_parameters() if "norm" in name or name == "self_query"}


def test_capture_keeps_what_it_has(tmp_path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    sequences = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]
    done: list[int] = []
    store = plan_capture(target, sequences, tmp_path / "captures")
    assert store.missing == [[0, 1, 2]]
    assert not store.folder.exists()
    fill(store, Live(target, sequences), "tiny", done.append)
    [shard] = store.shards
    stamp = shard.stat().st_mtime_ns
    again = capture(target, sequences, tmp_path / "captures")
    assert again.shards == [shard]
    assert shard.stat().st_mtime_ns == stamp
    assert sum(done) == 9
    full = store[2].hidden_TKH
    assert full.shape == (3, 4, 32)
    alone = capture(target, [(7, 8, 9)], tmp_path)[0]
    assert (alone.hidden_TKH.float() - full.float()).abs().max() < 0.05
    assert torch.equal(alone.best_T, store[2].best_T)
