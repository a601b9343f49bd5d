"""Clients that we did not write, against our server: ``make clients`` or ``scripts/clients.py NAME...``.

Each has an environment of its own under the cache folder, made when it is first needed, and a server of its own. What
they print and what the server logs is in runs/clients. (The official openai client is part of ``make test``.) MINUTES
says how long the soak takes (20). SECONDGUESS_DATA names the folder with gsm8k_test.jsonl for
lm-eval; TARGET another target than the default one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lm_eval_task import compare, write_task

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "clients"
CACHE = Path(os.environ.get("SECONDGUESS_CACHE", Path.home() / ".cache" / "secondguess")) / "clients"
TARGET = os.environ.get("TARGET", "smollm2-135m")
TREE = ("--budget", "3", "--num-steps", "3")  # what pays on two cores


@dataclass(frozen=True, slots=True)
class Call:
    """What a command is given."""

    url: str
    pid: int  # of the server
    tokenizer: Path
    folder: Path  # for its files


@dataclass(frozen=True, slots=True)
class Client:
    packages: tuple[str, ...]  # of its environment; none: it runs in ours
    commands: Callable[[Call], list[list[str]]]
    server: tuple[str, ...] = ()  # more flags of the server
    check: Callable[[Path], None] = lambda folder: None  # raises SystemExit when what it wrote is wrong


def schemathesis(call: Call) -> list[list[str]]:
    flags = ["--checks", "not_a_server_error", "--max-examples", "60", "--request-timeout", "120"]
    return [["schemathesis", "run", f"{call.url}/openapi.json", *flags]]


def guidellm(call: Call) -> list[list[str]]:
    flags = ["--profile", "sweep", "--rate", "4", "--max-seconds", "30", "--processor", str(call.tokenizer)]
    data = ["--data", "prompt_tokens=64,output_tokens=64", "--output-path", str(call.folder)]
    return [["guidellm", "benchmark", "run", "--target", call.url, *flags, *data]]


def aiperf(call: Call) -> list[list[str]]:
    endpoint = ["--url", call.url, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(call.tokenizer)]
    load = ["--concurrency", "4", "--request-count", "40", "--synthetic-input-tokens-mean", "64"]
    more = ["--output-tokens-mean", "64", "--ui", "none", "--artifact-dir", str(call.folder)]
    return [["aiperf", "profile", "--model", TARGET, *endpoint, *load, *more]]


def lm_eval(call: Call) -> list[list[str]]:
    """Twice: with the drafter, and decoded plainly."""
    write_task(call.folder, Path(os.environ.get("SECONDGUESS_DATA", ".")))
    model = f"model={TARGET},base_url={call.url}/v1/completions,num_concurrent=4,max_retries=1,tokenized_requests=False"
    model += f",tokenizer_backend=huggingface,tokenizer={call.tokenizer}"
    task = ["--tasks", "gsm8k_here", "--include_path", str(call.folder), "--limit", "40", "--log_samples"]
    run = ["lm_eval", "--model", "local-completions", "--model_args", model, *task]
    ways = {"drafted": "seed=1", "plain": "seed=1,speculation=False"}
    return [[*run, "--gen_kwargs", extra, "--output_path", str(call.folder / way)] for way, extra in ways.items()]


def soak(call: Call) -> list[list[str]]:
    minutes = os.environ.get("MINUTES", "20")
    return [["python", str(ROOT / "scripts" / "soak.py"), call.url, "--pid", str(call.pid), "--minutes", minutes]]


CLIENTS = {
    "schemathesis": Client(("schemathesis",), schemathesis, server=("--max-model-len", "128")),
    "guidellm": Client(("guidellm",), guidellm),
    "aiperf": Client(("aiperf",), aiperf),
    "lm-eval": Client(("lm-eval[api]",), lm_eval, check=compare),
    "soak": Client((), soak, server=("--max-model-len", "1024")),
}


def environment(name: str, client: Client) -> Path:
    """The folder of the client's programs."""
    if not client.packages:
        return Path(sys.executable).parent
    folder = CACHE / name
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *client.packages], check=True)
        (folder / "ready").touch()
    return folder / "bin"


@contextmanager
def server(flags: tuple[str, ...], log: Path) -> Iterator[tuple[str, int]]:
    """The server's URL and process id, once it is ready; it is told to end afterwards, and has to."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "secondguess", "serve", TARGET, "--port", str(port), *TREE, *flags]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_up(url):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: see {log}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        if process.wait(150) != 0:
            raise SystemExit(f"the server ended with an error: see {log}")


def is_up(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def save_tokenizer() -> Path:
    """Of the target, for clients that count tokens."""
    folder = OUT / "tokenizer"
    code = "import sys; from secondguess.target.load import load_target; "
    code += "load_target(sys.argv[1]).tokenizer.save_pretrained(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, TARGET, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def run(name: str, tokenizer: Path) -> bool:
    """Whether all went well."""
    client, folder = CLIENTS[name], OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    programs = environment(name, client)
    with server(client.server, folder / "server.log") as (url, pid), (folder / "log").open("w") as log:
        for command in client.commands(Call(url, pid, tokenizer, folder)):
            print("$", *command, flush=True)
            if execute([str(programs / command[0]), *command[1:]], folder, log) != 0:
                return False
    client.check(folder)
    return True


def execute(command: list[str], folder: Path, log: TextIO) -> int:
    """The exit code of a command that runs in ``folder``. What it prints goes to the log, too."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=folder, **streams)
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
        log.write(line)
    return process.wait()


def main(names: list[str]) -> int:
    for name in names:
        if name not in CLIENTS:
            raise SystemExit(f"no client {name!r}: there are {', '.join(CLIENTS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer()
    done = {name: run(name, tokenizer) for name in names or CLIENTS}
    for name, ok in done.items():
        print(f"{name:<14} {'done' if ok else 'FAILED'}   {OUT / name / 'log'}")
    return 0 if all(done.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
