"""Gumbel noise that is a function of (seed, choice, position, token id) and of nothing else.

There is no generator state, so any subset of tokens can be evaluated, in any order and batch, on any device.

R requests, V vocabulary, K chosen tokens. Hashes are 64-bit words held in int64 (two's complement, products wrap).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_NUM_BITS = 52  # (bits + 0.5) / 2**52 is exact in float64 and never 0 or 1


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    # `>>` copies the sign bit; the mask makes it the unsigned shift, without which the mixer would lose bits.
    return x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place (Steele, Lea and Flood, OOPSLA 2014)."""
    _xor_shift_(x, 30).mul_(_MIX_1)
    _xor_shift_(x, 27).mul_(_MIX_2)
    return _xor_shift_(x, 31)


def hash_words(seeds_R: Tensor, choices_R: Tensor, positions_R: Tensor, token_ids: Tensor) -> Tensor:
    """64 random bits for each (row, token): int64 [R, V] or [R, K].

    A SplitMix64 stream is read at any index i as mix(key + (i + 1) * gamma). The seed's stream gives the choices' keys,
    a choice's stream the positions' keys, a position's stream the tokens' words.
    """
    keys_R = _mix_(seeds_R.clone())
    for index_R in (choices_R, positions_R):
        keys_R = _mix_(keys_R + (index_R + 1) * _GAMMA)
    return _mix_(keys_R[:, None] + (token_ids + 1) * _GAMMA)


def gumbel(
    seeds_R: Tensor, choices_R: Tensor, positions_R: Tensor, token_ids: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard Gumbel noise, ``dtype`` [R, V] or [R, K], for all-int64 arguments.

    ``token_ids`` is [V], the same tokens for every row, or [R, K]. ``seeds_R`` are in [0, 2**63), ``positions_R`` are
    absolute positions of the tokens to be drawn. argmax(log p + noise) is a draw from p (Gumbel-max). The two
    logarithms are taken in float64 whatever ``dtype`` is: float32 has no numbers between 1 - 2**-24 and 1.
    """
    words = hash_words(seeds_R, choices_R, positions_R, token_ids)
    bits = (words >> (64 - _NUM_BITS)).bitwise_and_(2**_NUM_BITS - 1)
    return gumbel_from_bits(bits).to(dtype)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """The Gumbel quantile of (bits + 0.5) / 2**52, in float64 and finite for every int64 ``bits`` in [0, 2**52)."""
    uniform = bits.double().add_(0.5).mul_(2.0**-_NUM_BITS)
    return uniform.log_().neg_().log_().neg_()
