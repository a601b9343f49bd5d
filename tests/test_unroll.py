"""Unrolled drafts: which rows are trained and what they see, literally; both levels against the serving forward."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from secondguess.bench.chain import chain_rows
from secondguess.config import DrafterConfig, SecondLook, TreeConfig
from secondguess.config import Reconsider as Switches
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.fields import choices
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.batch import Batch, start_rows, trained_rows
from secondguess.train.head import Reading
from secondguess.train.second import Second, carried_rows, most_doubtful
from secondguess.train.unroll import advance, begin
from unrolling import EVERY_ROW, random_batch, second_features, unrolled


@pytest.fixture
def setting():
    target = tiny_target("llama")
    drafter = tiny_drafter(target).requires_grad_(True)
    return target, drafter, random_batch(target, drafter)


# -- rows ------------------------------------------------------------------------------------------------------------


def test_rows_of_the_worked_example() -> None:
    """Six tokens, the last four the answer: rows 1, 2, 3 at step 0; then a second sequence starts at packed index 6."""
    target = tiny_target("llama")
    batch = random_batch(target, tiny_drafter(target), lengths=(6, 4), starts=(2, 1))
    assert start_rows(batch).tolist() == [1, 2, 3, 6, 7]
    everything = replace(batch, best_T=torch.zeros(10, dtype=torch.int64))
    assert trained_rows(everything, 4).tolist() == [5, 3, 1, 0]
    assert trained_rows(replace(everything, best_T=-(torch.arange(10) == 4).long()), 3).tolist() == [4, 2, 0]


def test_steps_train_fewer_and_fewer_rows(setting) -> None:
    _, drafter, batch = setting
    steps = unrolled(drafter, batch, 5)
    # Answers of 5 and 2 tokens: 4 + 1 rows at step 0, one less per sequence and step.
    # Row p at step j is taught the target's distribution after token p + 1 + j.
    assert [step.drafts.at_X.tolist() for step in steps] == [[2, 3, 4, 5, 10], [3, 4, 5], [4, 5], [5]]
    assert torch.equal(steps[1].first.kept_X, batch.offered_T[[3, 4, 5]])


def test_few_rows_still_train(setting) -> None:
    """An answer of one token trains no row; a small rho gives one row of few a second look."""
    target, drafter, _ = setting
    assert unrolled(drafter, random_batch(target, drafter, lengths=(4,), starts=(3,)), 3, EVERY_ROW) == []
    short = random_batch(target, drafter, lengths=(4, 4), starts=(3, 1))
    steps = unrolled(drafter, short, 3, replace(EVERY_ROW, rho=0.1))
    assert [(len(step.first.kept_X), len(second_features(step))) for step in steps] == [(2, 1), (1, 1)]


def test_second_looks_are_at_trained_rows_the_most_doubtful_first() -> None:
    """Of six rows two are not trained, though nothing is as doubtful; of the other four rho is a share."""
    doubt, kept = [0.5, 0.9, 0.1, 0.99, 0.3, 0.4], [True, False, True, False, True, True]
    first = replace(reading([0.0] * 6), confidence_X=1 - torch.tensor(doubt), kept_X=torch.tensor(kept))
    assert most_doubtful(first, 1.0).tolist() == kept
    assert most_doubtful(first, 0.5).nonzero().flatten().tolist() == [0, 5]
    assert most_doubtful(first, 0.01).nonzero().flatten().tolist() == [0]
    none_kept = replace(first, kept_X=torch.zeros(6, dtype=torch.bool))
    assert most_doubtful(none_kept, 1.0).sum() == 1
    everything = replace(first, kept_X=torch.ones(6, dtype=torch.bool))
    assert most_doubtful(everything, 0.5).nonzero().flatten().tolist() == [0, 1, 3]


# -- what rows see ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_row_sees_its_own_draft_and_nothing_of_the_others(num_layers: int) -> None:
    """Causality by gradient: one row at step 2 depends on the taps of features 0..p only."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, num_layers=num_layers)
    batch = random_batch(target, drafter, offered=1)
    taps = batch.taps_TLH.clone().requires_grad_(True)
    step = unrolled(drafter, replace(batch, taps_TLH=taps), 3, EVERY_ROW)[2]
    for f_XH in (step.drafts.f_XH, second_features(step)):
        (gradient,) = torch.autograd.grad(f_XH[1].square().sum(), taps, retain_graph=True)
        touched = gradient.abs().sum((1, 2)).nonzero().squeeze(1).tolist()
        assert touched == [0, 1, 2]  # the second row of the first sequence started at feature 2


def test_the_mask_of_hass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per query position, the pass whose key it sees at each position of seven; drafts start at features 0 to 4.

    Keys are all alike and values tell pass and position, so what a query attends to says what it sees.
    """
    shape = DrafterConfig(
        hidden_size=4, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=22, vocab_size=8,
        draft_vocab_size=8, target_hidden_size=4, target_num_layers=8,
    )  # fmt: skip
    drafter = Drafter(shape, torch.randn(8, 4), torch.arange(8))
    [layer], seen = drafter.blocks, []

    def project(e: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros(len(positions), 1, 22)
        return zeros, zeros, torch.nn.functional.one_hot(7 * len(seen) + positions, 22).float()[:, None]

    def finish(y: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        passes_XPT = (attended[:, 0, :21] > 0).unflatten(1, (3, 7))
        assert passes_XPT.sum(1).max() == 1, "one key per position"
        shown = [["".join(str(p) for p in range(3) if row[p][t]) or "." for t in range(7)] for row in passes_XPT]
        seen.append(["".join(row) for row in shown])
        return y

    monkeypatch.setattr(drafter, "rotation", lambda positions: positions)
    monkeypatch.setattr(layer, "project", project)
    monkeypatch.setattr(layer, "finish", finish)
    batch = Batch(
        torch.arange(7), torch.randn(7, 3, 4), torch.randn(7, 4), torch.randn(8, 4),
        torch.ones(7, dtype=torch.bool), torch.tensor([7]), torch.tensor([1]),
    )  # fmt: skip
    drafts = begin(drafter, batch)
    for _ in range(2):
        assert drafts is not None
        drafts = advance(drafter, batch, drafts, drafts.f_XH)
    assert seen[0] == ["0......", "00.....", "000....", "0000...", "00000.."]
    assert seen[1] == ["01.....", "001....", "0001...", "00001.."]
    assert seen[2] == ["012....", "0012...", "00012.."]


def test_hass_cuts_the_gradient_between_passes_and_nothing_else(setting) -> None:
    """The next pass depends on the feature in EAGLE-3 alone, on the keys of step 0 in both; its values are the same."""
    _, drafter, batch = setting
    eagle, hass = (unrolled(drafter, batch, 2, None, through_time) for through_time in (True, False))
    for steps, depends in ((eagle, True), (hass, False)):
        f_XH, (k_TGD, _) = steps[0].drafts.f_XH, steps[0].drafts.seen.shared[0]
        loss = steps[1].first.loss_X.sum()
        by_feature, by_key = torch.autograd.grad(loss, (f_XH, k_TGD), retain_graph=True, allow_unused=True)
        assert (by_feature is not None) == depends
        assert by_key.abs().max() > 0
    assert torch.equal(eagle[1].first.loss_X, hass[1].first.loss_X)


# -- against serving -------------------------------------------------------------------------------------------------

WORDS: dict[str, tuple[Any, ...]] = {"see_own_level0": (True, False), **choices(SecondLook)}
LOOKS = [SecondLook(**dict(zip(WORDS, values, strict=True))) for values in itertools.product(*WORDS.values())]


@pytest.mark.parametrize(("num_layers", "lens"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_training_features_equal_the_serving_forward_on_a_chain(look: SecondLook, num_layers: int, lens: bool) -> None:
    """A chain of the text's own tokens through the speculator gives the features of both levels at every step."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, look=look, num_layers=num_layers, lens=lens)
    batch = random_batch(target, drafter, lengths=(9,), starts=(4,), offered=1)
    row, start, tokens = 1, 4, batch.tokens_T  # the second row starts at feature 4
    steps = unrolled(drafter, batch, 3, replace(EVERY_ROW, look=look))
    tree = TreeConfig(num_steps=4, reconsider=Switches(**asdict(look)))
    s = EagleSpeculator(drafter, tree, num_slots=1, num_columns=32)
    s.accept([Accepted(0, tokens[1 : start + 2], batch.taps_TLH[: start + 1])])
    root = int(tokens[start + 1])
    _, round_ = s.begin(Roots((0,), (root,), ([root],), (GREEDY,)))
    for depth in (1, 2, 3):
        child, node = tokens[start + 1 + depth], tokens[start + depth]
        round_.forward(chain_rows(depth, child[None], node[None], look.see_own_level0))
    served_YH = round_.features_RYH[0]  # the root, then level 0 of a node and level 1 of the node above it
    for j, step in enumerate(steps):
        assert (served_YH[max(2 * j - 1, 0)] - step.drafts.f_XH[row]).abs().max() < 1e-10
        assert (served_YH[2 * j + 2] - second_features(step)[row]).abs().max() < 1e-10
    confidence = drafter.logits(served_YH[0]).softmax(-1).max()
    assert (steps[0].first.confidence_X[row] - confidence).abs() < 1e-10


def test_every_switch_of_a_second_look_changes_it(setting) -> None:
    """Else the equality above would say little."""
    target, drafter, _ = setting
    batch = random_batch(target, drafter, offered=1)
    features = [second_features(unrolled(drafter, batch, 2, replace(EVERY_ROW, look=look))[1]) for look in LOOKS]
    with_lens = tiny_drafter(target, lens=True)
    features.append(second_features(unrolled(with_lens, batch, 2, EVERY_ROW)[1]))
    for one, other in itertools.combinations(features, 2):
        assert (one - other).abs().amax(-1).min() > 1e-6


# -- what goes on ----------------------------------------------------------------------------------------------------


def test_carried_rows_change_the_next_step_only_where_carried(setting) -> None:
    target, drafter, _ = setting
    batch = random_batch(target, drafter, offered=1)
    plain, carried = (unrolled(drafter, batch, 2, replace(EVERY_ROW, carry=c)) for c in ("off", "all"))
    assert torch.equal(plain[0].drafts.f_XH, carried[0].drafts.f_XH)
    assert (plain[1].drafts.f_XH - carried[1].drafts.f_XH).abs().amax(-1).min() > 1e-6
    half = unrolled(drafter, batch, 2, replace(EVERY_ROW, carry="half"))
    moved = (plain[1].drafts.f_XH - half[1].drafts.f_XH).abs().amax(-1) > 1e-6
    assert moved.any()
    assert not moved.all()


def test_merge_carries_where_level_1_finds_the_next_token_more_probable() -> None:
    nothing = -torch.inf
    first = reading([-1.0, -1.0, -2.0, nothing, -3.0])
    looked = torch.tensor([0, 1, 3, 4])
    second = Second(looked, torch.zeros(4, 2), reading([-0.5, -1.0, nothing, -2.5]))
    coin = torch.Generator()
    assert carried_rows(first, second, "merge", coin).tolist() == [True, False, False, False, True]
    assert carried_rows(first, second, "all", coin).nonzero().flatten().tolist() == looked.tolist()


def reading(next_logps: list[float]) -> Reading:
    zeros = torch.zeros(len(next_logps))
    return Reading(zeros, zeros, zeros, torch.tensor(next_logps), torch.ones(len(next_logps), dtype=torch.bool))


def test_of_equals_one_guess_is_right(setting) -> None:
    """In bfloat16 several tokens often share the largest probability; serving would have to choose, too."""
    _, drafter, batch = setting
    torch.nn.init.zeros_(drafter.lm_head.weight)
    guesses = [step.first.right_X[step.first.kept_X] for step in unrolled(drafter, batch, 3)]
    best = torch.cat([batch.best_T[s.drafts.at_X][s.first.kept_X] for s in unrolled(drafter, batch, 3)])
    assert len(best.unique()) > 2
    assert torch.equal(torch.cat(guesses), (best == 0).to(torch.cat(guesses)))


def test_next_log_probs_are_the_text_s(setting) -> None:
    """Of the token that the next step reads; -inf where the drafter cannot offer it."""
    _, drafter, batch = setting
    ids, unknown = drafter.target_ids.tolist(), 0
    for step in unrolled(drafter, batch, 3):
        logps_XV = drafter.logits(step.drafts.f_XH).log_softmax(-1).detach()
        for x, at in enumerate(step.drafts.at_X.tolist()):
            token, found = int(batch.tokens_T[at + 1]), float(step.first.next_logp_X[x])
            unknown += token not in ids
            assert found == (pytest.approx(float(logps_XV[x, ids.index(token)])) if token in ids else -torch.inf)
    assert 0 < unknown < 10
