"""What this machine computes with."""

from __future__ import annotations

import ctypes
import platform
import re
from contextlib import suppress
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


def available_bytes() -> int | None:
    """Memory that is free for this process, by the machine's word and its control group's; None if it is not known."""
    try:
        free = 1024 * number_in(Path("/proc/meminfo").read_text(), "MemAvailable:")
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
        # Of what a group uses, files that were read go when something else is needed.
        used -= number_in((group / "memory.stat").read_text(), "inactive_file")
        return min(free, int(limit) - used) if limit.strip() != "max" else free
    except OSError:
        return free


def give_back_memory() -> None:
    """What was freed in small pieces, which glibc keeps otherwise. Elsewhere nothing happens."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def number_in(text: str, name: str) -> int:
    """The number after ``name`` at the beginning of a line."""
    return int(re.findall(rf"^{name}\s+(\d+)", text, re.M)[0])
