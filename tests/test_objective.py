"""The objective: gradients against EAGLE-3.1's, logits in parts against logits at once, the anchor, HASS by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secondguess.config import SecondLook
from secondguess.drafter.checkpoint import save_drafter
from secondguess.errors import UserError
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train import chunks
from secondguess.train.anchor import Anchor, copy_of, make_anchor
from secondguess.train.config import TrainConfig
from secondguess.train.objective import reconsider_of
from secondguess.train.second import Reconsider
from unrolling import EVERY_ROW, gradients, objective, random_batch, second_features, unrolled


def config_of(**settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"draft_vocab_size": 32, "unroll_steps": 3}
    return TrainConfig(responses="-", out="-", **(defaults | settings))


def setting(config: TrainConfig, seed: int = 0):
    """A tiny drafter for these settings, and a batch."""
    target = tiny_target("llama")
    look = config.second_look
    drafter = tiny_drafter(target, seed, look is not None, look).requires_grad_(True)
    return drafter, random_batch(target, drafter)


def test_without_level_1s_influence_gradients_are_eagles() -> None:
    config = config_of(unroll_steps=4, level1_weight=0.0, attach=0.0, carry="off")
    drafter, batch = setting(config)
    eagle, pr = (
        gradients(drafter, objective(drafter, batch, config, reconsider)[0])
        for reconsider in (None, Reconsider(rho=1.0, attach=0.0, carry="off", seed=0))
    )
    for name in eagle.keys() - {"self_query"}:
        assert (eagle[name] - pr[name]).abs().max() < 1e-12, name


def test_detached_level_1_still_trains_the_block_and_the_query() -> None:
    config = config_of(attach=0.0)
    drafter, batch = setting(config)
    level1 = gradients(drafter, objective(drafter, batch, config, replace(EVERY_ROW, attach=0.0))[0])
    level0 = gradients(drafter, objective(drafter, batch, config, None)[0])
    assert level1["self_query"].abs().max() > 0
    name = "midlayer.mlp.down_proj.weight"
    assert (level1[name] - level0[name]).abs().max() > 1e-6


def test_the_sum_by_hand() -> None:
    """HASS + PR: both losses of both levels at every step, over the rows that are trained."""
    config = config_of(method="hass+pr", level1_weight=0.7, top_k=3, top_k_weight=0.4, step_decay=0.5, carry="off")
    drafter, batch = setting(config)
    look = reconsider_of(config, 0)
    assert look is not None

    def loss_of(f_XH: Tensor, target_XV: Tensor) -> Tensor:
        logps_XV = drafter.logits(f_XH).log_softmax(-1)
        threshold_X1 = target_XV.sort(-1, descending=True).values[:, 2:3]
        best_XV = torch.where(target_XV >= threshold_X1, target_XV, 0)
        return -((target_XV + 0.4 * best_XV) * logps_XV).sum(-1)

    expected = 0.0
    for j, step in enumerate(unrolled(drafter, batch, 3, look, through_time=False)):
        at = step.drafts.at_X
        target_XV = (batch.hidden_TH[at] @ batch.head_VH.T).softmax(-1)
        doubt_X = 1 - drafter.logits(step.drafts.f_XH).softmax(-1).amax(-1)
        kept_X = batch.offered_T[at]
        loss0_X, loss1_Y = loss_of(step.drafts.f_XH, target_XV), loss_of(second_features(step), target_XV[kept_X])
        both = loss0_X[kept_X] + 0.7 * doubt_X[kept_X] * loss1_Y
        expected += 0.5**j * both.sum().item() / kept_X.sum().item()
    loss, tally = objective(drafter, batch, config, look)
    assert loss.item() == pytest.approx(expected)
    assert tally.rows == [int(batch.offered_T[list(rows)].sum()) for rows in ((2, 3, 4, 5, 10), (3, 4, 5), (4, 5))]


def test_several_batches_share_their_rows() -> None:
    """Sums over two batches, each divided by the rows of both, add up to those of one batch of both sequences."""
    config, target = config_of(method="eagle3.1"), tiny_target("llama")
    drafter, _ = setting(config)
    one, other = (random_batch(target, drafter, (7,), (2,), seed) for seed in (0, 1))
    other = replace(other, head_VH=one.head_VH)
    packed = ("tokens_T", "taps_TLH", "hidden_TH", "best_T", "lengths_B", "answer_starts_B")
    both = replace(one, **{name: torch.cat([getattr(one, name), getattr(other, name)]) for name in packed})
    whole, tally = objective(drafter, both, config, None)
    parts = [objective(drafter, part, config, None, tally.rows)[0].item() for part in (one, other)]
    assert whole.item() == pytest.approx(sum(parts))


SETTINGS = [
    {"method": "eagle3.1"},
    {"method": "pr", "query_slot": "soft_pred", "rho": 0.6, "loss": "lk"},
    {"method": "hass", "loss": "kl"},
    {"method": "hass+pr", "carry": "merge", "loss": "tv"},
    {"method": "pr", "balance": "anchor", "balance_weight": 0.5},
    {"method": "pr", "balance": "hinge", "balance_weight": 0.5, "query_rope": "next", "see_own_level0": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logits_in_parts_are_logits_at_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(**settings)
    drafter, batch = setting(config)
    anchor = make_anchor(config, setting(config, seed=1)[0])
    results = []
    for chunk in (2**24, 64):  # 64: two rows of 32 tokens
        monkeypatch.setattr(chunks, "CHUNK", chunk)
        loss, tally = objective(drafter, batch, config, reconsider_of(config, 0), anchor=anchor)
        results.append((loss.detach(), gradients(drafter, loss), tally))
    (whole, whole_gradients, whole_tally), (parts, parts_gradients, parts_tally) = results
    assert abs(whole - parts) < 1e-12
    for name, gradient in whole_gradients.items():
        assert (gradient - parts_gradients[name]).abs().max() < 1e-12, name
    assert {k: pytest.approx(v) for k, v in whole_tally.summary().items()} == parts_tally.summary()


def test_in_parts_no_matrix_of_rows_by_vocabulary_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(method="hass+pr", carry="merge", query_slot="soft_pred", draft_vocab_size=20)
    target = tiny_target("llama", vocab_size=40)
    drafter = tiny_drafter(target, look=SecondLook(query_slot="soft_pred")).requires_grad_(True)
    batch, rows, most = random_batch(target, drafter), 5, {}
    for chunk in (2**24, 64):
        kept: list[torch.Size] = []
        monkeypatch.setattr(chunks, "CHUNK", chunk)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.shape) or x, lambda x: x):
            objective(drafter, batch, config, reconsider_of(config, 0))
        head = (drafter.config.hidden_size, 20)
        most[chunk] = max(shape[0] for shape in kept if shape[1:] == (20,) and shape != head)
    assert most[2**24] == rows
    assert most[64] < rows


# -- the anchor ------------------------------------------------------------------------------------------------------


def test_an_anchor_is_the_divergence_from_its_level_0() -> None:
    """Of each step from the reference's own step, beta times; nothing at the start, where both are the same."""
    config = config_of(balance="anchor", balance_weight=0.3, carry="off")
    drafter, batch = setting(config)
    other = setting(config, seed=1)[0]
    look, free = reconsider_of(config, 0), config_of(carry="off")
    loss, tally = objective(drafter, batch, config, look, anchor=Anchor(other, 1.0))
    extra = 0.0
    for j, (ours, theirs) in enumerate(zip(unrolled(drafter, batch, 3), unrolled(other, batch, 3), strict=True)):
        q, p = (d.logits(s.drafts.f_XH).softmax(-1) for d, s in ((drafter, ours), (other, theirs)))
        extra += 0.3 * 0.8**j * ((p * (p / q).log()).sum(-1)[ours.first.kept_X]).mean().item()
    assert loss.item() - objective(drafter, batch, free, look)[0].item() == pytest.approx(extra)
    assert all(drift > 0 for drift in tally.summary()["drift"])
    start = make_anchor(config, drafter)
    assert start is not None
    assert objective(drafter, batch, config, look, anchor=start)[1].drift == pytest.approx([0, 0, 0], abs=1e-12)


def test_a_moving_average_follows_and_is_kept() -> None:
    config = config_of(balance="anchor", balance_weight=0.3, anchor_decay=0.75)
    drafter, _ = setting(config)
    anchor = make_anchor(config, drafter)
    assert anchor is not None
    assert anchor.reference.embedding is drafter.embedding, "the embedding is the largest part and never changes"
    before = drafter.lm_head.weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            drafter.lm_head.weight += 1.0
        anchor.follow(drafter)
    # 0.75 (0.75 w + 0.25 (w + 1)) + 0.25 (w + 2)
    torch.testing.assert_close(anchor.reference.lm_head.weight, before + 0.6875)
    again = Anchor(copy_of(drafter), 0.75)
    again.load_state_dict(anchor.state_dict())
    torch.testing.assert_close(again.reference.lm_head.weight, before + 0.6875)


def test_another_drafter_can_be_the_anchor(tmp_path: Path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    drafter, eagle = tiny_drafter(target), tiny_drafter(target, reconsideration=False)
    save_drafter(eagle, tmp_path / "eagle", {}, torch.float32)
    stays = config_of(balance="anchor", balance_weight=0.3, anchor_to=str(tmp_path / "eagle"))
    anchor = make_anchor(stays, drafter)
    assert anchor is not None
    anchor.follow(drafter)  # which it does not
    assert torch.equal(anchor.reference.fc.weight, eagle.fc.weight)
    save_drafter(tiny_drafter(target, seed=1), tmp_path / "other", {})
    with pytest.raises(UserError, match="another draft vocabulary"):
        make_anchor(replace(stays, anchor_to=str(tmp_path / "other")), drafter)
    with pytest.raises(UserError, match="no drafter 'nowhere'"):
        make_anchor(replace(stays, anchor_to="nowhere"), drafter)
    assert make_anchor(config_of(), drafter) is None
