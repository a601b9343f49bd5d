"""Keyed Gumbel noise: the exact hash, independence of everything but the key, and the quality of the bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secondguess.engine.noise import gumbel, gumbel_from_bits, hash_words

GAMMA, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
NUM_DRAWS = 1_000_000
seeds_st = st.integers(0, 2**63 - 1)
small_st = st.integers(0, 2**31)


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def key(seed: int, choice: int, position: int) -> int:
    k = mix(seed)
    for index in (choice, position):
        k = mix((k + (index + 1) * GAMMA) & MASK)
    return k


def word(seed: int, choice: int, position: int, token: int) -> int:
    return mix((key(seed, choice, position) + (token + 1) * GAMMA) & MASK)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def draws(axis: str) -> Tensor:
    """About 1e6 hash words, neighbours along ``axis`` side by side in the last dimension."""
    n, index = 1000, torch.arange(1000)
    zeros = torch.zeros_like(index)
    if axis == "token":
        return hash_words(zeros + 7, zeros, index, index)
    rows = {"seed": (index, zeros, zeros), "choice": (zeros, index, zeros), "position": (zeros, zeros, index)}
    return hash_words(*rows[axis], torch.arange(n)).T.contiguous()


def uniforms(words: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-gumbel_from_bits((words >> 12) & (2**52 - 1))))


def test_the_mixer_of_these_tests_gives_the_published_splitmix64_stream():
    stream = [mix((1234567 + i * GAMMA) & MASK) for i in range(1, 4)]
    assert stream == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(seeds_st, small_st, small_st, st.lists(st.integers(0, 300_000), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_hash_equals_unbounded_integer_arithmetic(seed: int, choice: int, position: int, tokens: list[int]):
    words = hash_words(ints(seed), ints(choice), ints(position), ints(*tokens))
    assert [w & MASK for w in words[0].tolist()] == [word(seed, choice, position, t) for t in tokens]


@given(st.lists(st.tuples(seeds_st, small_st, small_st), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_any_subset_of_tokens_and_rows_has_the_same_bits(rows: list[tuple[int, int, int]], data: st.DataObject):
    seeds_R, choices_R, positions_R = (ints(*column) for column in zip(*rows, strict=True))
    tokens = data.draw(st.lists(st.integers(0, 4999), min_size=1, max_size=70))
    whole_RV = gumbel(seeds_R, choices_R, positions_R, torch.arange(5000), torch.float64)
    some_RK = gumbel(seeds_R, choices_R, positions_R, ints(*tokens).expand(len(rows), -1), torch.float64)
    assert torch.equal(some_RK, whole_RV[:, tokens])
    last_R1 = gumbel(seeds_R[-1:], choices_R[-1:], positions_R[-1:], ints(*tokens), torch.float64)
    assert torch.equal(last_R1, whole_RV[-1:, tokens])


def test_rows_may_have_their_own_tokens():
    noise_RK = gumbel(ints(1, 2), ints(0, 0), ints(5, 5), torch.tensor([[3, 4], [9, 8]]), torch.float64)
    assert torch.equal(noise_RK[1:], gumbel(ints(2), ints(0), ints(5), ints(9, 8), torch.float64))


def test_extreme_bits_give_finite_noise_of_the_right_size():
    low, high = gumbel_from_bits(ints(0, 2**52 - 1)).tolist()
    assert low == pytest.approx(-math.log(53 * math.log(2)))
    assert high == pytest.approx(53 * math.log(2))


def test_float32_noise_is_the_rounded_float64_noise():
    args = ints(3), ints(0), ints(11), torch.arange(1000)
    assert torch.equal(gumbel(*args), gumbel(*args, torch.float64).float())


def test_noise_has_gumbel_moments():
    noise = gumbel(ints(42), ints(0), ints(9), torch.arange(NUM_DRAWS), torch.float64)
    assert abs(noise.mean() - 0.5772156649) < 5 * (math.pi / math.sqrt(6)) / math.sqrt(NUM_DRAWS)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)


@pytest.mark.parametrize("axis", ["token", "seed", "choice", "position"])
def test_draws_are_uniform_and_neighbours_along_every_axis_are_independent(axis: str):
    u = uniforms(draws(axis))
    singles = torch.histc(u, bins=1000, min=0, max=1)
    pairs = torch.histc((u[:, :-1] * 32).floor() * 32 + (u[:, 1:] * 32).floor(), bins=1024, min=0, max=1024)
    for counts in (singles, pairs):
        expected = counts.sum() / len(counts)
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - len(counts)) < 6 * math.sqrt(2 * len(counts))
    for lag in (1, 2, 64):
        correlation = torch.corrcoef(torch.stack([u[:, :-lag].flatten(), u[:, lag:].flatten()]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(NUM_DRAWS)


@pytest.mark.parametrize(("argument", "num_bits"), [(0, 63), (1, 16), (2, 24), (3, 18)])
def test_flipping_any_input_bit_flips_every_output_bit_half_the_time(argument: int, num_bits: int):
    num = 4096
    columns = [torch.arange(num) * 12345, torch.arange(num) % 7, torch.arange(num), torch.arange(num) % 4001]
    before = hash_words(columns[0], columns[1], columns[2], columns[3][:, None])
    for bit in range(num_bits):
        flipped = list(columns)
        flipped[argument] = columns[argument] ^ (1 << bit)
        changed = before ^ hash_words(flipped[0], flipped[1], flipped[2], flipped[3][:, None])
        shares = (changed >> torch.arange(64) & 1).double().mean(0)
        assert (shares - 0.5).abs().max() < 6 * 0.5 / math.sqrt(num)
