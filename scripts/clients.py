"""Clients that we did not write, against our server: ``make clients`` or ``scripts/clients.py [--quick] [NAME...]``.

Each has an environment of its own under the cache folder, made when it is first needed, and a server of its own. What
they print and what the server logs is in runs/clients/NAME, what they found in runs/clients/NAME.json. ``--quick`` only
shows that they work. (The official openai client is part of ``make test``.) SECONDGUESS_DATA names the folder with
gsm8k_test.jsonl for lm-eval; TARGET another target than the default one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any, TextIO

import lm_eval_task
from serving import Served, server

from secondguess.commands.record import make_record, write_json
from secondguess.errors import install

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "clients"
CACHE = Path(os.environ.get("SECONDGUESS_CACHE", Path.home() / ".cache" / "secondguess")) / "clients"
TARGET = os.environ.get("TARGET", "smollm2-135m")
TREE = ("--budget", "3", "--num-steps", "3")  # what pays on two cores
LIMIT_S = 3600.0  # of a command, which is then killed
DRAFTED = {"speculation": {"method": "pr"}}  # whether it pays or not


@dataclass(frozen=True, slots=True)
class Scale:
    """How much each client does."""

    examples: int  # of each route (schemathesis)
    steps: int  # of a sweep, and their seconds (guidellm)
    seconds: int
    requests: int  # aiperf
    questions: int  # lm-eval
    minutes: float  # soak


FULL = Scale(examples=60, steps=5, seconds=45, requests=40, questions=40, minutes=20)
QUICK = Scale(examples=3, steps=3, seconds=20, requests=4, questions=4, minutes=0.5)


@dataclass(frozen=True, slots=True)
class Call:
    """What a client is given."""

    served: Served
    tokenizer: Path
    folder: Path  # for its files
    scale: Scale


Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Client:
    packages: tuple[str, ...]  # of its environment, the client's first; none: it runs in ours
    commands: Callable[[Call], list[list[str]]]
    found: Callable[[Path], Found]  # in the folder that it wrote to; raises SystemExit when that is wrong
    server: tuple[str, ...] = ()  # more flags of the server


def schemathesis(call: Call) -> list[list[str]]:
    flags = ["--checks", "not_a_server_error", "--max-examples", str(call.scale.examples), "--request-timeout", "120"]
    return [["schemathesis", "run", f"{call.served.url}/openapi.json", *flags]]


def guidellm(call: Call) -> list[list[str]]:
    """A sweep: one request after the other, as many at once as it can, and rates in between."""
    where = ["--backend", f"kind=openai_http,target={call.served.url},model={TARGET}"]
    texts = ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=64"]
    counts = ["--tokenizer", f"kind=huggingface_auto,model={call.tokenizer}"]
    load = ["--profile", f"kind=sweep,sweep_size={call.scale.steps},max_concurrency=8"]
    load += ["--constraint", f"kind=max_duration,seconds={call.scale.seconds}"]
    files = ["--output", "kind=console", "--output", f"kind=json,path={call.folder / 'benchmarks.json'}"]
    return [["guidellm", "run", *where, *texts, *counts, *load, *files, "--disable-console-interactive"]]


def aiperf(call: Call) -> list[list[str]]:
    endpoint = ["--url", call.served.url, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(call.tokenizer)]
    load = ["--concurrency", "4", "--request-count", str(call.scale.requests), "--synthetic-input-tokens-mean", "64"]
    more = ["--output-tokens-mean", "64", "--ui", "none", "--artifact-dir", str(call.folder)]
    return [["aiperf", "profile", "--model", TARGET, *endpoint, *load, *more, "--extra-inputs", json.dumps(DRAFTED)]]


def lm_eval(call: Call) -> list[list[str]]:
    """Twice: with the drafter, and decoded plainly."""
    lm_eval_task.write_task(call.folder, Path(os.environ.get("SECONDGUESS_DATA", ".")))
    model = f"model={TARGET},base_url={call.served.url}/v1/completions,num_concurrent=4,max_retries=1"
    model += f",tokenized_requests=False,tokenizer_backend=huggingface,tokenizer={call.tokenizer}"
    task = ["--tasks", lm_eval_task.NAME, "--include_path", str(call.folder), "--limit", str(call.scale.questions)]
    run = ["lm_eval", "run", "--model", "local-completions", "--model_args", model, *task, "--log_samples"]
    return [
        [*run, "--gen_kwargs", json.dumps({"speculation": asked}), "--output_path", str(call.folder / way)]
        for way, asked in lm_eval_task.WAYS.items()
    ]


def soak(call: Call) -> list[list[str]]:
    length = ["--pid", str(call.served.pid), "--minutes", str(call.scale.minutes)]
    return [["python", str(ROOT / "scripts" / "soak.py"), call.served.url, *length, "--json", "soak.json"]]


def found_by_schemathesis(folder: Path) -> Found:
    """How many requests it made up; its exit code says whether one was answered with 500."""
    cases = re.search(r"Test cases:\s+(.+)", (folder / "log").read_text())
    if cases is None:
        raise SystemExit("schemathesis: no word of its test cases")
    return {"test_cases": cases[1]}


def found_by_guidellm(folder: Path) -> Found:
    rows = [row_of_sweep(b) for b in json.loads((folder / "benchmarks.json").read_text())["benchmarks"]]
    if not rows or any(row["errored"] or not row["successful"] for row in rows):
        raise SystemExit(f"guidellm: not all requests were answered: {rows}")
    return {"sweep": rows}


def row_of_sweep(benchmark: Found) -> Found:
    metrics = benchmark["metrics"]
    latencies = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    rates = ("requests_per_second", "output_tokens_per_second")
    totals = {kind: metrics["request_totals"][kind] for kind in ("successful", "errored", "incomplete")}
    found = {name: metrics[name]["successful"]["median"] for name in latencies}
    found |= {name: metrics[name]["successful"]["mean"] for name in rates}
    return {"strategy": benchmark["config"]["strategy"], **totals, **found}


def found_by_aiperf(folder: Path) -> Found:
    """Its own table of our acceptance."""
    if "Spec Decode" not in (folder / "log").read_text():
        raise SystemExit("aiperf: no Spec Decode table: it does not read metrics.speculative_decoding")
    export = json.loads((folder / "profile_export_aiperf.json").read_text())
    wanted = ("request_throughput", "output_token_throughput", "time_to_first_token", "inter_token_latency")
    spec = {name: value for name, value in export.items() if "spec_decode" in name or "acceptance" in name}
    return {name: export[name] for name in wanted if name in export} | spec


def found_by_soak(folder: Path) -> Found:
    return json.loads((folder / "soak.json").read_text())["rows"][0]


CLIENTS = {
    "schemathesis": Client(("schemathesis",), schemathesis, found_by_schemathesis, server=("--max-model-len", "128")),
    "guidellm": Client(("guidellm",), guidellm, found_by_guidellm),
    "aiperf": Client(("aiperf",), aiperf, found_by_aiperf),
    "lm-eval": Client(("lm-eval[api]", "transformers"), lm_eval, lm_eval_task.compare),
    "soak": Client((), soak, found_by_soak, server=("--max-model-len", "512", "--kv-cache-tokens", "640")),
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


def version_of(client: Client, programs: Path) -> str | None:
    """Of the client's package."""
    if not client.packages:
        return None
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    command = [programs / "python", "-c", code, client.packages[0].partition("[")[0]]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def save_tokenizer() -> Path:
    """Of the target, for clients that count tokens."""
    folder = OUT / "tokenizer"
    code = "import sys; from secondguess.target.load import load_target; "
    code += "load_target(sys.argv[1]).tokenizer.save_pretrained(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, TARGET, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def run(name: str, tokenizer: Path, scale: Scale) -> bool:
    """Whether all went well. What was found goes to OUT, where nothing of an earlier run is left."""
    client, folder, record = CLIENTS[name], OUT / name, make_record() | {"command": shlex.join(sys.argv)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    programs, started = environment(name, client), time.monotonic()
    row: Found = {"client": name, "version": version_of(client, programs), "server": [*TREE, *client.server]}
    row |= {"commands": [], "exit_codes": [], "error": None}
    try:
        with server(TARGET, row["server"], folder / "server.log") as served, (folder / "log").open("w") as log:
            for command in client.commands(Call(served, tokenizer, folder, scale)):
                row["commands"].append(shlex.join(command).replace(str(ROOT), "."))
                row["exit_codes"].append(execute(programs, command, folder, log))
        row |= client.found(folder)
        if any(row["exit_codes"]):
            raise SystemExit(f"{name}: exit codes {row['exit_codes']}")
    # It said no, or did not write what it should; or the server did not start, or not end well.
    except (SystemExit, OSError, LookupError, ValueError) as error:
        row["error"] = f"{type(error).__name__}: {error}"
        print(row["error"])
    row["seconds"] = round(time.monotonic() - started, 1)
    write_json(OUT / f"{name}.json", record, "rows", [row])
    return row["error"] is None


def execute(programs: Path, command: list[str], folder: Path, log: TextIO) -> int:
    """The exit code of a command that runs in ``folder``. What it prints goes to the log, too."""
    print("$", shlex.join(command), flush=True)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen([str(programs / command[0]), *command[1:]], cwd=folder, **how)
    end = Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))  # its children, too: they hold the pipe
    end.start()
    assert process.stdout
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
        return process.wait()
    finally:
        end.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a little of each")
    args = parser.parse_args(argv)
    if unknown := {*args.names} - {*CLIENTS}:
        parser.error(f"no client {min(unknown)!r}: there are {', '.join(CLIENTS)}")
    if find_spec("xgrammar") is None:
        parser.error(f"clients ask for grammars, too: {install('grammar')}")
    OUT.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer()
    done = {name: run(name, tokenizer, QUICK if args.quick else FULL) for name in args.names or CLIENTS}
    for name, ok in done.items():
        print(f"{name:<14} {'done' if ok else 'FAILED'}   {OUT / name}.json")
    return 0 if all(done.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
