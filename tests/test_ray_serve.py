"""Two replicas behind Ray Serve's proxy, one of which is killed under load."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("openai")

import httpx
from openai import OpenAI

from ports import free_port
from secondguess import LLM, SamplingParams

REPLICA = b"ray::ServeReplica:secondguess"
PARENT = 1  # in /proc/PID/stat, after the command's name in brackets
BODY = {"model": "target", "prompt": "hello", "max_tokens": 64, "seed": 7, "temperature": 1.0}
MORE = {"ignore_eos": True}


@contextmanager
def process(command: list[str], folder: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command whose output goes to ``folder / "log"``; ended by SIGTERM."""
    patience = {f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S": "120" for name in ("READY", "HEALTH")}  # on a busy machine
    with (folder / "log").open("a") as log:
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ | patience | settings)
        try:
            yield running
        finally:
            running.terminate()
            running.wait(60)


@dataclass(frozen=True, slots=True)
class Served:
    """``cluster``: the process that started it."""

    url: str
    cluster: int

    @property
    def replicas(self) -> list[int]:
        return replicas(self.cluster)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A server on a cluster of its own, of this machine alone."""
    port, ray_port = free_port(), free_port()
    start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--include-dashboard=false"]
    start += ["--num-cpus=2", "--node-ip-address=127.0.0.1", f"--port={ray_port}"]
    models = ["target", "--drafter", "drafters/pr", "--served-model-name", "target", "--max-batch-size", "2"]
    flags = ["--port", str(port), "--ray", "--device", "cpu", "--replicas", "2"]
    flags += ["--replica-cpus", "0.1", "--drain-timeout", "5"]
    serve, cluster = [sys.executable, "-m", "secondguess", "serve", *models, *flags], f"127.0.0.1:{ray_port}"
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # to this cluster and its clients
    with process(start, folder, **known) as head:
        wait_for_port(ray_port)
        start_proxy(port, os.environ | known | {"RAY_ADDRESS": cluster})
        with process(serve, folder, RAY_ADDRESS=cluster, **known) as server:
            wait_for(f"http://127.0.0.1:{port}", server, folder / "log")
            yield Served(f"http://127.0.0.1:{port}", head.pid)
        assert server.returncode == 0


def start_proxy(port: int, settings: dict[str, str]) -> None:
    """Ray waits a minute for its proxy, which on a busy machine is there after two."""
    start = f"from ray import serve; serve.start(http_options={{'host': '127.0.0.1', 'port': {port}}})"
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", start], env=settings, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    pytest.fail(done.stderr)


def wait_for_port(port: int) -> None:
    for _ in range(120):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(1)
    pytest.fail(f"nothing listens at {port}")


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        try:
            if httpx.get(f"{address}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert server.poll() is None, log.read_text()
        time.sleep(1)
    pytest.fail(log.read_text())


def parents() -> dict[int, int]:
    """By process of this machine."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[PARENT])
    return found


def descendants(pid: int) -> Iterator[int]:
    """Processes that it started, and those that they started."""
    family, known = {pid}, parents()
    while new := {child for child, parent in known.items() if parent in family} - family:
        family |= new
        yield from new


def replicas(cluster: int) -> list[int]:
    """The processes of replicas, of this cluster alone: there may be others on the machine."""
    found = []
    for pid in descendants(cluster):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(REPLICA):
                found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_through_the_proxy(folder: Path, served: Served) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=64, ignore_eos=True)
    expected = LLM(folder / "target", method="ar").generate("hello", params)[0].text
    body = BODY | MORE | {"stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(texts) == expected
    assert len(texts) > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_replica_costs_no_request(served: Served) -> None:
    """Those in flight on it fail with a 5xx, which OpenAI's client sends again; nobody else notices."""
    assert len(served.replicas) == 2
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=8, timeout=60)
    expected = client.completions.create(**BODY, extra_body=MORE).choices[0].text
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.completions.create, **BODY, extra_body=MORE) for _ in range(40)]
        next(iter(answers)).result()
        os.kill(served.replicas[0], signal.SIGKILL)
        assert {answer.result().choices[0].text for answer in answers} == {expected}
    for _ in range(120):
        if len(served.replicas) == 2:
            break
        time.sleep(1)
    assert len(served.replicas) == 2, "another one stands in for the one that died"
