"""Linear layers for the few rows of a cycle: weights in few bits, activations and sums in float32 (inference, CPU).

K inputs, N outputs, S outputs of a block, B blocks, U groups of GROUP inputs, I words of J bytes in a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from secondguess.errors import UserError
from secondguess.kernels.build import constant, library
from secondguess.kernels.structs import GROUP, PACK, Weights, address


class CompactLinear(nn.Module):
    """``x [..., K] -> [..., N]``, float32. Keeps no other copy of the weight than ``packed``.

    ``form`` is one of ``FORMS``; int8 and int4 need K to be a multiple of GROUP. An output is a sum over the inputs in
    ascending order, so its bits do not depend on the other rows. Raises BuildError where the kernel cannot be compiled.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear, form: str) -> None:
        super().__init__()
        if form in EXPANSIONS and linear.in_features % GROUP:
            raise UserError(f"{form} weights need multiples of {GROUP} inputs, a layer has {linear.in_features}")
        self.bias, self.shape = linear.bias, tuple(linear.weight.shape)
        self.code, self._kernel = constant(f"form_{form}"), library().linear
        self.register_buffer("packed", pack(linear.weight.detach(), form, constant("block_size")), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x, (n, k) = x.contiguous(), self.shape
        y = x.new_empty(*x.shape[:-1], n)
        self._kernel(self.code, address(x), x.numel() // k, k, n, self.packed.data_ptr(), y.data_ptr())
        return y if self.bias is None else y + self.bias

    def struct(self) -> Weights:
        """As the compiled code reads it, while this is kept."""
        outputs, inputs = self.shape
        return Weights(self.code, inputs, outputs, self.packed.data_ptr(), address(self.bias))


class CompactNorm(nn.Module):
    """RMS norm of float32 rows ``x [..., K]``, without a dozen calls for a few rows. Raises BuildError as above."""

    def __init__(self, weight_K: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self._kernel = weight_K.detach(), eps, library().norm

    def forward(self, x: Tensor) -> Tensor:
        x, k = x.contiguous(), len(self.weight)
        y = torch.empty_like(x)
        self._kernel(address(x), x.numel() // k, k, address(self.weight), self.eps, y.data_ptr())
        return y


@dataclass(frozen=True, slots=True)
class Grouped:
    """Weights as scale * number + offset, by groups of inputs."""

    numbers_NUG: Tensor  # float32, whole
    scales_NU1: Tensor
    offsets_NU1: Tensor | None

    def expanded(self) -> Tensor:
        """float32 [N, K], as the kernel expands them."""
        w_NUG = self.scales_NU1 * self.numbers_NUG
        return (w_NUG if self.offsets_NU1 is None else w_NUG + self.offsets_NU1).flatten(1)


def to_int8(weight_NK: Tensor) -> Grouped:
    """Symmetric, 8 bits. A weight that came from Q8_0 is met exactly."""
    w_NUG = weight_NK.unflatten(1, (-1, GROUP))
    scales_NU1 = w_NUG.abs().amax(2, keepdim=True) / 127
    return Grouped(divided(w_NUG, scales_NU1).clamp(-127, 127), scales_NU1, None)


def to_int4(weight_NK: Tensor) -> Grouped:
    """From the smallest to the largest weight of a group in 15 steps, as Q4_1: what came from it is met exactly.

    Like there, scale and offset are rounded to float16, without which that would not be so.
    """
    w_NUG = weight_NK.unflatten(1, (-1, GROUP))
    low_NU1, high_NU1 = w_NUG.amin(2, keepdim=True), w_NUG.amax(2, keepdim=True)
    scales_NU1, offsets_NU1 = ((high_NU1 - low_NU1) / 15).half().float(), low_NU1.half().float()
    return Grouped(divided(w_NUG - offsets_NU1, scales_NU1).clamp(0, 15), scales_NU1, offsets_NU1)


def divided(w: Tensor, scales: Tensor) -> Tensor:
    """Whole numbers; 0 where the scale is 0."""
    return torch.where(scales > 0, w / scales, 0.0).round()


def pack(weight_NK: Tensor, form: str, block_size: int) -> Tensor:
    """The bytes that ``linear.h`` reads."""
    return FORMS[form](weight_NK.float(), block_size)


def blocks(x_NK: Tensor, size: int) -> Tensor:
    """[B, K, S]: outputs side by side, block by block; the last one is filled up with zeros."""
    return pad(x_NK, (0, 0, 0, -len(x_NK) % size)).unflatten(0, (-1, size)).transpose(1, 2)


def pack_float32(weight_NK: Tensor, size: int) -> Tensor:
    return blocks(weight_NK, size).contiguous()


def pack_bfloat16(weight_NK: Tensor, size: int) -> Tensor:
    return blocks(weight_NK, size).to(torch.bfloat16).contiguous()


def pack_int8(weight_NK: Tensor, size: int) -> Tensor:
    w = to_int8(weight_NK)
    numbers_BUX = blocks(w.numbers_NUG.flatten(1), size).unflatten(1, (-1, GROUP)).flatten(2).to(torch.int8)
    return torch.cat((raw(blocks(w.scales_NU1[..., 0], size)), numbers_BUX.view(torch.uint8)), 2)


def pack_int4(weight_NK: Tensor, size: int) -> Tensor:
    w = to_int4(weight_NK)
    assert w.offsets_NU1 is not None
    numbers_BUIJS = blocks(w.numbers_NUG.flatten(1), size).to(torch.uint8).unflatten(1, (-1, GROUP // PACK, PACK))
    low_BUIJS, high_BUIJS = numbers_BUIJS[..., ::2, :], numbers_BUIJS[..., 1::2, :]  # of a byte
    words_BUISJ = (low_BUIJS | (high_BUIJS << 4)).transpose(3, 4)
    scales_BUX, offsets_BUX = (raw(blocks(x_NU1[..., 0], size)) for x_NU1 in (w.scales_NU1, w.offsets_NU1))
    return torch.cat((scales_BUX, offsets_BUX, words_BUISJ.flatten(2)), 2)


def raw(x: Tensor) -> Tensor:
    """Its bytes."""
    return x.contiguous().view(torch.uint8)


FORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "float32": pack_float32,
    "bfloat16": pack_bfloat16,
    "int8": pack_int8,
    "int4": pack_int4,
}
EXPANSIONS = {"int8": to_int8, "int4": to_int4}


def rounded(weight_NK: Tensor, form: str) -> Tensor:
    """float32 [N, K]: the weights that a layer of this form multiplies with."""
    if form in EXPANSIONS:
        return EXPANSIONS[form](weight_NK.float()).expanded()
    return weight_NK.to(getattr(torch, form)).float()


def holds(linear: nn.Linear, form: str) -> bool:
    """Whether a layer of this form multiplies with the very same weights."""
    weight_NK = linear.weight.detach()
    fits = form not in EXPANSIONS or weight_NK.shape[1] % GROUP == 0
    return fits and torch.equal(rounded(weight_NK, form), weight_NK.float())
