"""docs/quick-start.md as a stranger takes it: a model's folder, the installed program, one command after the other.

``pytest -m slow -s tests/test_stranger.py`` shows what each took. The model is small and random, and flags are added
that make the commands short; nothing else differs from the page.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from docs_commands import Command, commands
from test_docs import short
from tiny_folder import save_tiny

PATIENCE = 120  # seconds until a server answers


@contextmanager
def timed(times: dict[str, float], what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[what] = time.perf_counter() - started


def program(argv: list[str]) -> list[str]:
    """What ``make setup`` puts beside the interpreter, where step 0 of the page looks for it."""
    return [str(Path(sys.executable).parent / "secondguess"), *argv]


def ask(command: Command, port: int) -> dict[str, Any]:
    """The page's curl command, without curl. A random model may end its answer at once: this one must not."""
    words = [word.replace(":8000/", f":{port}/") for word in command.words]
    body, header = json.loads(words[words.index("-d") + 1]), words[words.index("-H") + 1].split(": ")
    request = urllib.request.Request(words[1], json.dumps(body | {"ignore_eos": True}).encode(), dict([header]))
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
def test_from_a_folder_to_a_served_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    shutil.rmtree(tmp_path / "drafters")
    rows = [{"id": str(i), "turns": [f"Say {i}."]} for i in range(1, 25)]
    (tmp_path / "prompts.txt").write_text("".join(row["turns"][0] + "\n" for row in rows))
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "SECONDGUESS_CACHE", str(tmp_path / "cache"))
    times: dict[str, float] = {}
    setup, activate, *work, serve, curl = commands("docs/quick-start.md")
    assert (setup.text, activate.text) == ("make setup", ". .venv/bin/activate")
    for command in work:
        assert command.argv
        with timed(times, command.argv[0]):
            done = subprocess.run(program(short(command.argv)), check=False)
        assert done.returncode == 0 or command.argv[0] == "doctor", command.text
    assert serve.argv
    port = free_port()
    with timed(times, "serve until it answers"):
        server = subprocess.Popen(program([*short(serve.argv), "--port", str(port)]))
        wait_for(port, server)
    try:
        with timed(times, "curl"):
            answer = ask(curl, port)
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    assert answer["choices"][0]["message"]["content"]
    assert answer["metrics"]["speculative_decoding"]["by_level"]
    lines = [f"{seconds:6.1f} s  {what}" for what, seconds in times.items()]
    sys.stdout.write("\n".join(["", *lines, f"{sum(times.values()):6.1f} s  in all", ""]))
