"""What a run computes on, and in which precision."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from secondguess.errors import require
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target


def choose_device(wanted: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda``. Under torchrun every process of a machine takes a GPU of its own."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    require(torch.cuda.is_available(), "device is cuda, but PyTorch finds no GPU here: leave it out, or set device=cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def use_bfloat16(precision: str, device: torch.device) -> bool:
    """``auto`` takes bfloat16 products where the device multiplies them natively."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def open_target(name: str, precision: str, device: torch.device, say: Callable[[str], None]) -> HFTarget:
    """The target in the precision that is trained in: half the time of float32 where bfloat16 is native."""
    return load_target(name, "bfloat16" if use_bfloat16(precision, device) else "float32", str(device), say=say)
