"""A server in a process of its own, for scripts that put clients on it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 150  # for running requests when the server is told to end


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready."""

    url: str
    pid: int


@contextmanager
def server(target: str, flags: Sequence[str], log: Path) -> Iterator[Served]:
    """``secondguess serve``, which SIGTERM ends. Raises SystemExit if it does not start, or does not end well."""
    command = [sys.executable, "-m", "secondguess", "serve", target, "--port", str(free_port()), *flags]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    served = Served(f"http://127.0.0.1:{command[command.index('--port') + 1]}", process.pid)
    try:
        while not is_up(served.url):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: see {log}")
            time.sleep(0.2)
        yield served
    finally:
        code = end(process)
    if code != 0:
        raise SystemExit(f"the server ended with an error: see {log}")


def end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a server, which gets time for what runs. One that takes longer is killed."""
    process.terminate()
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def is_up(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def resident_mib(pid: int) -> float:
    """Memory of a process, on Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024
