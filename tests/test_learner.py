"""One step: its gradient does not depend on how the batch is split, and a gradient that is no number moves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from secondguess.drafter.checkpoint import save_drafter
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.batch import trained_rows
from secondguess.train.config import TrainConfig
from secondguess.train.learner import Diverged, Learner
from secondguess.train.second import Reconsider
from secondguess.train.tally import Tally
from tiny_run import float32_target, tiny_run
from two_processes import in_float64
from unrolling import objective, random_batch


def gradients(learner: Learner, batches: list[list[int]]) -> tuple[float, Tally, dict[str, torch.Tensor]]:
    loss, sums_TF = learner.gradients(0, batches)
    return (
        loss.item(),
        Tally.of(sums_TF),
        {name: p.grad.clone() for name, p in learner.drafter.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "eagle3.1"},
        {"method": "pr", "carry": "off"},
        {"method": "pr", "carry": "all", "balance": "hinge", "balance_weight": 0.3, "attach": 0.5},
        {"method": "hass+pr", "carry": "merge", "num_layers": 2, "loss": "lk"},
    ],
)
def test_a_step_of_two_batches_is_a_step_of_one(tmp_path, changes) -> None:
    trainer = tiny_run(tmp_path, "run", **changes)
    learner, eight = in_float64(trainer.learner), trainer.training[:8]
    loss, tally, whole = gradients(learner, [eight])
    split_loss, split_tally, split = gradients(learner, [eight[:4], eight[4:]])
    assert split_loss == pytest.approx(loss, rel=1e-12)
    assert split_tally.rows == tally.rows
    assert whole.keys() == split.keys() == dict(learner.drafter.named_parameters()).keys()
    for name, gradient in whole.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(split[name], gradient, rtol=1e-10, atol=1e-13)
    halves = [gradients(learner, [half])[2] for half in (eight[:4], eight[4:])]
    name = "midlayer.mlp.down_proj.weight"
    mean_of_means = (halves[0][name] + halves[1][name]) / 2
    assert (mean_of_means - whole[name]).abs().max() > 1e-6  # what a mean over each batch would have been


def test_rows_are_counted_as_they_are_trained() -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    batch = random_batch(target, drafter, lengths=(9, 4, 7), starts=(3, 1, 5))
    config = TrainConfig(responses="-", out="-", unroll_steps=6)
    _, tally = objective(drafter, batch, config, Reconsider(rho=0.5, attach=1.0, carry="half", seed=0))
    assert trained_rows(batch, 6).tolist() == [*map(int, tally.rows), *[0] * (6 - len(tally.rows))]
    assert trained_rows(replace(batch, best_T=torch.zeros_like(batch.best_T)), 6).tolist() == [8, 5, 3, 2, 1, 0]


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path) -> None:
    trainer = tiny_run(tmp_path, "run", method="pr")

    def spoil(step: int, loss: float) -> None:
        if step == 3:
            trainer.drafter.self_query.data.fill_(float("nan"))

    with pytest.raises(Diverged, match=r"the loss is nan at step 4: nothing is exported"):
        trainer.run(spoil)
    assert trainer.step == 3
    assert not trainer.folder.drafter.exists()
    assert not trainer.drafter.lm_head.weight.isnan().any()
    resumed = tiny_run(tmp_path, "run", method="pr")
    assert resumed.step == 3
    assert not resumed.drafter.self_query.isnan().any()


@pytest.mark.parametrize("whose", ["shared", "own"])
def test_a_gradient_of_either_level_that_is_no_number_moves_nothing(tmp_path, monkeypatch, whose) -> None:
    trainer = tiny_run(tmp_path, "run", method="pr", shared_loss="level0")
    before = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    learner, backward = trainer.learner, trainer.learner.backward

    def spoilt(level0: torch.Tensor, level1: torch.Tensor) -> None:
        backward(level0, level1)
        getattr(learner, whose)[0].grad.fill_(float("nan"))

    monkeypatch.setattr(learner, "backward", spoilt)
    said = "gradient of level 1 is nan at step 1" if whose == "own" else "gradient is nan at step 1"
    with pytest.raises(Diverged, match=said):
        trainer.run()
    for name, p in trainer.drafter.named_parameters():
        assert torch.equal(p, before[name]), name


def test_both_gradient_norms_are_logged(tmp_path) -> None:
    trainer = tiny_run(tmp_path, "run", method="pr", shared_loss="level0", epochs=1)
    trainer.run()
    [line] = trainer.folder.log_lines()
    assert 0 < line["level1_grad_norm"] <= line["largest_level1_grad_norm"]
    assert line["level1_grad_norm"] != line["grad_norm"]


def norm_of(weights: list[torch.nn.Parameter]) -> float:
    return torch.cat([p.grad.flatten() for p in weights if p.grad is not None]).norm().item()


@pytest.mark.parametrize(
    ("shared_loss", "before", "norms", "after"),
    [
        ("both", (8.0, 6.0), [10.0], (1.6, 1.2)),  # one norm, scaled from 10 to 2
        ("both", (0.8, 0.6), [1.0], (0.8, 0.6)),
        ("level0", (8.0, 1.0), [8.0, 1.0], (2.0, 1.0)),
        ("level0", (1.0, 8.0), [1.0, 8.0], (1.0, 2.0)),
    ],
)
def test_gradients_above_the_limit_are_scaled_to_it(tmp_path, shared_loss, before, norms, after) -> None:
    """Of the shared weights, and of level 1's own."""
    learner = tiny_run(tmp_path, "run", method="pr", shared_loss=shared_loss, clip=2.0).learner
    for weights, norm in zip((learner.shared, learner.own), before, strict=True):
        weights[0].grad = torch.zeros_like(weights[0])
        weights[0].grad.view(-1)[1] = norm
    assert [norm.item() for norm in learner.clip()] == pytest.approx(norms)
    assert (norm_of(learner.shared), norm_of(learner.own)) == pytest.approx(after)


@pytest.mark.parametrize("shared_loss", ["both", "level0", "none"])
def test_a_step_of_bfloat16_products_is_near_that_of_float32(tmp_path, shared_loss) -> None:
    save_drafter(tiny_drafter(float32_target(), 5, reconsideration=False), tmp_path / "start", {"target": "tiny"})
    changes = {"method": "pr", "shared_loss": shared_loss, "warm_start": str(tmp_path / "start")}
    losses = []
    for precision in ("float32", "bfloat16"):
        run = tiny_run(tmp_path, precision, precision=precision, **changes)
        before = {name: p.detach().clone() for name, p in run.drafter.named_parameters()}
        losses.append(run.learner.step(0, [run.training[:8]], 1e-3).loss)
        for name, p in run.drafter.named_parameters():
            assert p.dtype == torch.float32
            assert p.isfinite().all(), name
            trained = p is run.drafter.self_query or shared_loss != "none"
            assert torch.equal(p, before[name]) != trained or name == "lens.weight", name
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("lens", [False, True])
def test_where_level_1_has_no_say_the_shared_weights_are_eagles_bit_for_bit(tmp_path, lens) -> None:
    eagle = tiny_run(tmp_path, "eagle", method="eagle3.1")
    pr = tiny_run(tmp_path, "pr", method="pr", carry="off", shared_loss="level0", lens=lens)
    own = {name: p.clone() for name, p in pr.drafter.named_parameters() if name in pr.drafter.config.level1_tensors}
    eagle.run()
    pr.run()
    theirs = dict(eagle.drafter.named_parameters())
    for name, p in pr.drafter.named_parameters():
        if name in own:
            assert not torch.equal(p, own[name]), name
        else:
            assert torch.equal(p, theirs[name]), name
    assert [line["grad_norm"] for line in pr.folder.log_lines()] == [
        line["grad_norm"] for line in eagle.folder.log_lines()
    ]


def test_level_1s_own_gradient_is_the_one_it_has_anyway(tmp_path) -> None:
    """Also of a second look's own weights, whose loss depends on features of level 0."""
    common = {"method": "pr", "carry": "off", "lens": True}
    alone, both = (tiny_run(tmp_path, how, shared_loss=how, **common) for how in ("level0", "both"))
    batch = alone.training[:8]
    ours, theirs = (gradients(in_float64(run.learner), [batch])[2] for run in (alone, both))
    for name in alone.drafter.config.level1_tensors:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-13)
    assert (ours["fc.weight"] - theirs["fc.weight"]).abs().max() > 1e-6
