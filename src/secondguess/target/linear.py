"""Linear layers with weights packed for the CPU (inference only, float32).

oneDNN reads the weights in its own blocked order, once packed instead of at every call. On the default target this
halves the time of a verify pass, and a row's result is the same bits in any batch of two rows or more (one row alone
takes other code).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS_HINT = 32  # oneDNN lays the weights out for about this many rows


class PackedLinear(nn.Module):
    """``x [..., in] -> [..., out]``, float32. Keeps no unpacked copy of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def packed(linear: nn.Linear) -> nn.Module:
    """The layer with its weights packed if they can be."""
    return PackedLinear(linear) if can_pack(linear) else linear


def can_pack(model: nn.Module) -> bool:
    """Whether all weights are float32 on the CPU and this build of PyTorch has the (private) oneDNN operators."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


def pack_linears(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` in place. A weight tied to an embedding stays with the embedding."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
