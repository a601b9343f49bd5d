"""In which precision a run computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target


def use_bfloat16(precision: str, device: torch.device) -> bool:
    """``auto`` takes bfloat16 products where the device multiplies them natively."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def open_target(
    name: str, precision: str, device: torch.device, trust_remote_code: bool, say: Callable[[str], None]
) -> HFTarget:
    """The target in the precision that is trained in: half the time of float32 where bfloat16 is native."""
    dtype = "bfloat16" if use_bfloat16(precision, device) else "float32"
    return load_target(name, dtype, str(device), trust_remote_code, say, whole=True)
