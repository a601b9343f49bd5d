"""A process that is no more."""

from __future__ import annotations

import subprocess
import sys


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
