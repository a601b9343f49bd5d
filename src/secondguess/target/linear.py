"""Linear layers with weights packed for the CPU (inference only, float32 activations).

In float32 oneDNN reads the weights in its own blocked order, once packed instead of at every call. On the default
target this halves the time of a verify pass, and a row's result is the same bits in any batch of two rows or more (one
row alone takes other code). Weights of fewer bits are read by our own kernel.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor, nn

from secondguess.errors import UserError
from secondguess.kernels.build import BuildError
from secondguess.kernels.linear import CompactLinear, holds, rounded
from secondguess.target.parts import is_whole

ROWS_HINT = 32  # oneDNN lays the weights out for about this many rows


class PackedLinear(nn.Module):
    """``x [..., in] -> [..., out]``, float32. Keeps no unpacked copy of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def packed(linear: nn.Linear, form: str = "float32") -> nn.Module:
    """The layer with its weights in ``form`` (see ``kernels.linear.FORMS``), packed if they can be.

    Without a C compiler the weights are rounded all the same, and multiplied in float32. Raises UserError if they
    cannot be in that form.
    """
    if form == "float32":
        return PackedLinear(linear) if can_pack(linear) else linear
    if linear.weight.dtype != torch.float32 or linear.weight.device.type != "cpu":
        raise UserError(f"{form} weights need a float32 model on the CPU")
    try:
        return CompactLinear(linear, form)
    except BuildError as error:
        warn_once(form, str(error))
        linear.weight = nn.Parameter(rounded(linear.weight.detach(), form), requires_grad=False)
        return packed(linear)


@cache
def warn_once(form: str, reason: str) -> None:
    """Not for each of a model's layers."""
    logging.getLogger(__name__).warning("%s weights are multiplied in float32: %s", form, reason)


def head_form(head: nn.Linear, form: str) -> str:
    """The output layer keeps 8 bits where 4 would change it: its errors go into the scores undamped."""
    return "int8" if form == "int4" and not holds(head, form) else form


def exact_form(model: nn.Module) -> str:
    """bfloat16 where that holds all weights as they are, as in checkpoints that ship: half the bytes to read."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return "bfloat16" if all(holds(linear, "bfloat16") for linear in linears) else "float32"


def can_pack(model: nn.Module) -> bool:
    """Whether all weights are here, in float32 on the CPU, and PyTorch's build has the (private) oneDNN operators."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return is_whole(model) and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


def pack_linears(model: nn.Module, form: str = "float32") -> None:
    """Replace every ``nn.Linear`` in place. A weight tied to an embedding stays with the embedding."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, packed(child, form))
