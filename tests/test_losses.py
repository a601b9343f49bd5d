"""Losses of a row, from their definitions in plain Python and by finite differences."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from secondguess.train.config import TrainConfig
from secondguess.train.losses import (
    LK_DECAY,
    LOSSES,
    Loss,
    kl,
    level1_weight,
    loss_of,
    overlap,
    spoilt,
    top_k_cross_entropy,
)

LOGITS = [0.5, -1.0, 2.0, 0.0]
TARGET = [0.1, 0.2, 0.6, 0.1]


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def literal(name: str, logits: list[float], target: list[float]) -> float:
    q = softmax(logits)
    pairs = [(p, q) for p, q in zip(target, q, strict=True) if p > 0]
    divergence = sum(p * math.log(p / q) for p, q in pairs)
    distance = sum(abs(p - q) for p, q in zip(target, q, strict=True)) / 2
    w = math.exp(-3 * (1 - distance))
    return {
        "soft_ce": -sum(p * math.log(q) for p, q in pairs),
        "kl": divergence,
        "tv": distance,
        "lk": w * divergence + (1 - w) * distance,
    }[name]


def rows(logits: list[float], target: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor([logits], dtype=torch.float64), torch.tensor([target], dtype=torch.float64)


def of_logits(loss: Loss) -> Loss:
    return lambda logits_XV, target_XV: loss(logits_XV.log_softmax(-1), target_XV)


@pytest.mark.parametrize("name", LOSSES)
@given(logits=st.lists(st.floats(-5, 5), min_size=2, max_size=6), data=st.data())
def test_losses_are_their_definitions(name: str, logits: list[float], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 9), min_size=len(logits), max_size=len(logits)).filter(any))
    target = [w / sum(weights) for w in weights]
    found = of_logits(LOSSES[name])(*rows(logits, target)).item()
    assert found == pytest.approx(literal(name, logits, target), abs=1e-12)


@pytest.mark.parametrize("name", ["soft_ce", "kl", "tv"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    logits_XV, target_XV = rows(LOGITS, TARGET)
    assert torch.autograd.gradcheck(of_logits(LOSSES[name]), (logits_XV.requires_grad_(True), target_XV))


def test_the_weights_of_lk_have_no_gradient() -> None:
    logits_XV, target_XV = rows(LOGITS, TARGET)
    logits_XV.requires_grad_(True)
    by_name = {
        name: torch.autograd.grad(of_logits(loss)(logits_XV, target_XV), logits_XV)[0] for name, loss in LOSSES.items()
    }
    w = torch.exp(-LK_DECAY * of_logits(overlap)(logits_XV, target_XV)).detach()
    torch.testing.assert_close(by_name["lk"], w * by_name["kl"] + (1 - w) * by_name["tv"])
    torch.testing.assert_close(by_name["kl"], by_name["soft_ce"])


def test_the_loss_of_hass_is_on_the_most_probable_tokens_too() -> None:
    logits_XV, target_XV = rows(LOGITS, TARGET)
    logits_XV.requires_grad_(True)
    q = softmax(LOGITS)
    expected = -(0.6 * math.log(q[2]) + 0.2 * math.log(q[1]))
    best_two = of_logits(partial(top_k_cross_entropy, k=2))
    assert best_two(logits_XV, target_XV).item() == pytest.approx(expected)
    assert torch.autograd.gradcheck(best_two, (logits_XV, target_XV))
    config = TrainConfig(responses="-", out="-", method="hass", top_k=2, top_k_weight=0.5, loss="kl")
    total = of_logits(loss_of(config))(logits_XV, target_XV)
    assert total.item() == pytest.approx(of_logits(kl)(logits_XV, target_XV).item() + 0.5 * expected)
    everything = of_logits(partial(top_k_cross_entropy, k=4))(logits_XV, target_XV)
    torch.testing.assert_close(everything, of_logits(LOSSES["soft_ce"])(logits_XV, target_XV))


def test_balance_terms() -> None:
    """The floor adds to the doubt; the hinge counts where the second look is worse, and leaves the first one alone."""
    assert level1_weight(torch.tensor([0.25, 1.0]), 0.5).tolist() == [1.25, 0.5]
    first, second = (torch.tensor(x, requires_grad=True) for x in ([1.0, 2.0], [3.0, 1.0]))
    penalty = spoilt(second, first)
    assert penalty.tolist() == [2.0, 0.0]
    penalty.sum().backward()
    assert second.grad is not None
    assert second.grad.tolist() == [1.0, 0.0]
    assert first.grad is None
