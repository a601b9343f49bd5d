"""What this machine computes with."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    system = f"{platform.system()} {platform.machine()}"
    return {"system": system, "cpu": cpu(), "threads": torch.get_num_threads(), "gpus": gpus}


def cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
