"""Where tensors are computed, and how small ones get there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from secondguess.errors import require

if TYPE_CHECKING:  # not at run time: the command line reads DEVICES before torch is needed
    import torch
    from torch import Tensor

DEVICES = ("auto", "cpu", "cuda")


def choose_device(wanted: str) -> torch.device:
    """``auto`` takes a GPU if there is one; ``cuda:1`` names one. Under torchrun each process of a machine has its own.

    Raises UserError for a device that is unknown or not there.
    """
    import torch

    known = wanted in DEVICES or (wanted.startswith("cuda:") and wanted[5:].isdecimal())
    require(known, f"unknown device {wanted!r}: choose one of {', '.join(DEVICES)}")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    require(torch.cuda.is_available(), "device is cuda, but PyTorch finds no GPU here: leave it out, or set device=cpu")
    device = torch.device(wanted if ":" in wanted else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    torch.cuda.set_device(device)
    return device


def check_share(device: str, gpus: float, flag: str) -> None:
    """Processes of a cluster know by ``gpus`` which of a machine's are theirs: without, all would take the first one.

    Raises UserError if they would, or if they reserved what they do not use.
    """
    require(gpus >= 0, f"{flag} must be at least 0, got {gpus}")
    require(
        gpus > 0 or device == "cpu", f"say with {flag} how many GPUs each takes (0.5: half of one), or --device cpu"
    )
    require(gpus == 0 or device != "cpu", f"{flag} reserves GPUs, and --device cpu uses none: leave one of them out")


def at_hand(x: Tensor) -> bool:
    """Whether the host may look at the values at no cost: on a GPU it would wait until they are computed."""
    return not x.is_cuda


def upload(numbers: Any, device: torch.device | str) -> Tensor:
    """A small tensor of numbers that the host knows. Nobody waits: a copy from pageable memory would."""
    import torch

    here = torch.tensor(numbers)
    if torch.device(device).type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
