"""Models of which a process holds a part: transformers' tensor parallelism makes their weights DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def num_parts(model: Any) -> int:
    """How many processes share each layer of a transformers model."""
    return model.tp_size or 1


def is_whole(module: nn.Module) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def whole(tensor: Tensor) -> Tensor:
    """With what the other processes hold, all of which must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
