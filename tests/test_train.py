"""Training: rows on literal cases, gradients against EAGLE-3.1's, level 1 against the serving forward, resume."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace

import pytest
import torch

from secondguess.capture.run import capture, fill, plan_capture
from secondguess.config import TreeConfig
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Accepted
from secondguess.errors import UserError
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.config import TrainConfig, dump_config, list_settings, load_config
from secondguess.train.data import Response, batches, read_responses, split_held_out
from secondguess.train.objective import objective
from secondguess.train.trainer import Trainer
from secondguess.train.unroll import Batch, Reconsider, Step, start_rows, unroll
from secondguess.tree.rows import DraftRows

EVERY_ROW = Reconsider(rho=1.0, attach=1.0, carry="off", seed=0)


def random_batch(target, drafter, lengths=(7, 5), starts=(2, 3), seed=0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    total, spec = sum(lengths), target.spec
    return Batch(
        tokens_T=torch.randint(spec.vocab_size, (total,), generator=g),
        taps_TLH=torch.randn(total, 3, spec.hidden_size, generator=g, dtype=torch.float64),
        target_TV=torch.randn(total, len(drafter.target_ids), generator=g, dtype=torch.float64).softmax(-1),
        offered_T=torch.rand(total, generator=g) < 0.8,
        lengths_B=torch.tensor(lengths),
        answer_starts_B=torch.tensor(starts),
    )


@pytest.fixture
def setting():
    target = tiny_target("llama")
    drafter = tiny_drafter(target).requires_grad_(True)
    return target, drafter, random_batch(target, drafter)


def test_rows_of_the_worked_example() -> None:
    """Six tokens, the last four the answer: rows 1, 2, 3 at step 0; then a second sequence starts at packed index 6."""
    target = tiny_target("llama")
    batch = random_batch(target, tiny_drafter(target), lengths=(6, 4), starts=(2, 1))
    assert start_rows(batch).tolist() == [1, 2, 3, 6, 7]


def test_steps_train_fewer_and_fewer_rows(setting) -> None:
    _, drafter, batch = setting
    steps = list(unroll(drafter, batch, 5, None))
    # Answers of 5 and 2 tokens: 4 + 1 rows at step 0, one less per sequence and step.
    assert [len(step.logits0_XV) for step in steps] == [5, 3, 2, 1]
    # Row p at step j is taught the target's distribution after token p + 1 + j.
    assert torch.equal(steps[1].target_XV, batch.target_TV[[3, 4, 5]])
    assert torch.equal(steps[0].target_XV, batch.target_TV[[2, 3, 4, 5, 10]])


def test_few_rows_still_train(setting) -> None:
    """An answer of one token trains no row; a small rho gives one row of few a second look."""
    target, drafter, _ = setting
    assert list(unroll(drafter, random_batch(target, drafter, lengths=(4,), starts=(3,)), 3, EVERY_ROW)) == []
    short = random_batch(target, drafter, lengths=(4, 4), starts=(3, 1))
    steps = list(unroll(drafter, short, 3, replace(EVERY_ROW, rho=0.1)))
    assert [(len(step.logits0_XV), int(step.looked_X.sum())) for step in steps] == [(2, 1), (1, 1)]


def test_a_row_sees_its_own_draft_and_nothing_of_the_others(setting) -> None:
    """Causality by gradient: the logits of one row at step 2 depend on the taps of features 0..p only."""
    _, drafter, batch = setting
    taps = batch.taps_TLH.clone().requires_grad_(True)
    steps = list(unroll(drafter, replace(batch, taps_TLH=taps), 3, EVERY_ROW))
    for logits in (steps[2].logits0_XV, second_logits(steps[2])):
        (gradient,) = torch.autograd.grad(logits[1].square().sum(), taps, retain_graph=True)
        touched = gradient.abs().sum((1, 2)).nonzero().squeeze(1).tolist()
        assert touched == [0, 1, 2]  # the second row of the first sequence started at feature 2


def test_without_level_1s_influence_gradients_are_eagles(setting) -> None:
    _, drafter, batch = setting
    config = TrainConfig(responses="-", out="-", unroll_steps=4, level1_weight=0.0, attach=0.0, carry="off")
    gradients = []
    for reconsider in (None, Reconsider(rho=1.0, attach=0.0, carry="off", seed=0)):
        drafter.zero_grad()
        objective(drafter, batch, config, reconsider)[0].backward()
        gradients.append({n: p.grad.clone() for n, p in drafter.named_parameters() if n != "self_query"})
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).abs().max() < 1e-12, name


def test_detached_level_1_still_trains_the_block_and_the_query(setting) -> None:
    _, drafter, batch = setting
    config = TrainConfig(responses="-", out="-", unroll_steps=3, attach=0.0)
    objective(drafter, batch, config, replace(EVERY_ROW, attach=0.0))[0].backward()
    assert drafter.self_query.grad.abs().max() > 0
    level1 = drafter.midlayer.mlp.down_proj.weight.grad.clone()
    drafter.zero_grad()
    objective(drafter, batch, config, None)[0].backward()
    assert (level1 - drafter.midlayer.mlp.down_proj.weight.grad).abs().max() > 1e-6


def test_carried_rows_change_the_next_step_only_where_carried(setting) -> None:
    _, drafter, batch = setting
    plain, carried = (list(unroll(drafter, batch, 2, replace(EVERY_ROW, carry=c))) for c in ("off", "all"))
    assert torch.equal(plain[0].logits0_XV, carried[0].logits0_XV)
    assert (plain[1].logits0_XV - carried[1].logits0_XV).abs().amax(-1).min() > 1e-6
    half = list(unroll(drafter, batch, 2, replace(EVERY_ROW, carry="half")))
    moved = (plain[1].logits0_XV - half[1].logits0_XV).abs().amax(-1) > 1e-6
    assert moved.any()
    assert not moved.all()


def test_training_logits_equal_the_serving_forward_on_a_chain(setting) -> None:
    """A chain of ground-truth tokens through the speculator gives both levels' logits of the unroll's steps."""
    target, drafter, _ = setting
    batch = random_batch(target, drafter, lengths=(9,), starts=(4,))
    steps, row, anchor = list(unroll(drafter, batch, 3, EVERY_ROW)), 1, 4  # the second row starts at feature 4
    s = EagleSpeculator(drafter.requires_grad_(False), TreeConfig(num_steps=4), num_slots=1, num_columns=32)
    tokens = batch.tokens_T
    served: list[torch.Tensor] = []
    offers = s.offers
    s.offers = lambda f_RXH, *more: served.append(drafter.logits(f_RXH)[0]) or offers(f_RXH, *more)  # type: ignore
    s.accept([Accepted(0, tokens[1 : anchor + 2], batch.taps_TLH[: anchor + 1])])
    round_ = start_round(s)
    # Step j of the chain: node j at level 0, and node j - 1 reconsidered beside it, as serving batches them.
    lineage = [[True]]
    level0_row = 0
    for j in (1, 2):
        seen = [*lineage[level0_row], *[False] * (len_rows(round_) - len(lineage[level0_row]))]
        visible = torch.tensor([[[*seen, True, False], [*seen, False, True]]])
        visible[0, 1, level0_row] = True
        round_.forward(
            DraftRows(
                tokens_RX=tokens[[anchor + 1 + j, anchor + j]][None],
                feature_rows_RX=torch.tensor([[level0_row, level0_row]]),
                depths_RX=torch.tensor([[j, j - 1]]),
                visible_RXY=visible,
                valid_RX=torch.ones(1, 2, dtype=torch.bool),
                num_level0=1,
            )
        )
        lineage += [visible[0, 0].tolist(), []]
        level0_row = len(lineage) - 2
        assert (served[-1][0] - steps[j].logits0_XV[row]).abs().max() < 1e-10
        assert (served[-1][1] - second_logits(steps[j - 1])[row]).abs().max() < 1e-10


def second_logits(step: Step) -> torch.Tensor:
    assert step.logits1_YV is not None
    return step.logits1_YV


def start_round(s: EagleSpeculator):
    from secondguess.drafter.speculator import Round

    return Round(s, [0], s.extend([0], [s.slots[0]]), [s.slots[0].num_columns])


def len_rows(round_) -> int:
    return round_.features_RYH.shape[1]


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


def test_config_rejects_what_it_does_not_know(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("responses: r.jsonl\nout: runs/x\nlr: 1e-3\n")
    assert load_config(path, ["epochs=2", "method=eagle3.1"]).lr == 1e-3
    for override, match in [
        ("epoch=2", "did you mean epochs"),
        ("epochs=two", "whole number"),
        ("method=hass", "one of eagle3.1, pr"),
        ("rho=2", r"in \[0, 1\]"),
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
    assert "(half, off, all); default: half" in listed


# -- runs ------------------------------------------------------------------------------------------------------------


def tiny_run(tmp_path, name: str, data_seed: int = 0, target_seed: int = 0, **changes) -> Trainer:
    """A trainer on a tiny target and 24 random responses."""
    target = tiny_target("llama", target_seed, dtype=torch.float32)
    rng = random.Random(data_seed)
    responses = [
        Response(f"r{i}", tuple(rng.randrange(1, 64) for _ in range(rng.randrange(8, 20))), prompt_len=3)
        for i in range(24)
    ]
    store = capture(target, [r.input_ids for r in responses], tmp_path / "captures")
    config = TrainConfig(
        responses="-", out=str(tmp_path / name), draft_vocab_size=32, unroll_steps=3, epochs=3, batch_size=4,
        eval_every=4, save_every=3, held_out=0.2, precision="float32", **changes,
    )  # fmt: skip
    return Trainer(config, target, responses, store)


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["eagle3.1", "pr"])
def test_a_killed_run_continues_bit_for_bit(tmp_path, method: str) -> None:
    whole = tiny_run(tmp_path, "whole", method=method)
    losses: dict[int, float] = {}
    whole.run(lambda step, loss: losses.__setitem__(step, loss))

    killed = tiny_run(tmp_path, "killed", method=method)

    def kill_at_7(step: int, loss: float) -> None:
        if step == 7:
            raise Killed

    with pytest.raises(Killed):
        killed.run(kill_at_7)
    resumed = tiny_run(tmp_path, "killed", method=method)
    assert resumed.step == 6
    again: dict[int, float] = {}
    resumed.run(lambda step, loss: again.__setitem__(step, loss))
    assert again == {step: loss for step, loss in losses.items() if step > 6}
    for name, parameter in whole.drafter.named_parameters():
        assert torch.equal(parameter, dict(resumed.drafter.named_parameters())[name]), name
    logs = [[line | {"seconds": 0} for line in trainer.folder.log_lines()] for trainer in (whole, resumed)]
    assert logs[0] == logs[1]


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
    spared = {id(p) for g in trainer.optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    names = {name for name, p in trainer.drafter.named_parameters() if id(p) in spared}
    assert names == {name for name, _ in trainer.drafter.named_parameters() if "norm" in name or name == "self_query"}


def test_capture_keeps_what_it_has(tmp_path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    sequences = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]
    done: list[int] = []
    store = plan_capture(target, sequences, tmp_path / "captures")
    assert store.missing == [0]
    assert not store.folder.exists()
    fill(store, target, sequences, done.append)
    stamp = store.path(0).stat().st_mtime_ns
    again = capture(target, sequences, tmp_path / "captures")
    assert again.path(0).stat().st_mtime_ns == stamp
    assert sum(done) == 9
    full = store[2].hidden_T4H
    assert full.shape == (3, 4, 32)
    alone = capture(target, [(7, 8, 9)], tmp_path)[0]
    assert (alone.hidden_T4H.float() - full.float()).abs().max() < 0.05
    assert torch.equal(alone.best_T, store[2].best_T)
