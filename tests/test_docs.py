"""The documentation: every command in it is run, links lead somewhere, what is made from code is whole.

Commands run page by page, in the order of the page, on a tiny target, with flags added that make them short
(``SHORTER``). What a command waits for is there: lines for a chat, a client for a server, a server for a client. All
commands that do not run here are listed in ``NOT_RUN``, with the reason and the tests that run their like; they are
read by the real parser.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, dynamic_module_utils

from docs_commands import PAGES, ROOT, Command, blocks, commands, python_blocks
from foreign_drafter import write_foreign
from secondguess.bench import growth
from secondguess.bench.tasks import TASKS
from secondguess.cli import COMMANDS, main, parser_of
from secondguess.commands import serve
from secondguess.commands.show_findings import STYLES, conclusion
from secondguess.drafter import shipped
from secondguess.drafter.checks import CHECKS, Finding
from secondguess.prepare import synthesize
from secondguess.server import listen
from secondguess.train.config import load_config
from test_endpoint import Api, echo
from test_server_faults import listening
from tiny_folder import byte_tokenizer, save_tiny

# Last of two flags or settings wins.
SHORTER: dict[str, list[str]] = {
    "generate": ["--max-new-tokens", "8"],
    "chat": ["--max-new-tokens", "8"],
    "serve": ["--port", "0"],
    "reproduce": [
        "--tasks", "gsm8k,mt_bench", "--limit", "2", "--live-limit", "1", "--max-new-tokens", "8", "--dtype", "float32",
        "--budget", "8", "--temperature", "1",
    ],
    "bench": ["--limit", "2", "--max-new-tokens", "8", "--rounds", "1"],
    "eval": ["--limit", "2", "--max-new-tokens", "8"],
    "trace": ["--limit", "2", "--max-new-tokens", "16"],
    "diagnose": ["--limit", "2", "--max-new-tokens", "16"],
    "prepare": ["--max-new-tokens", "16"],
    "doctor": ["--max-new-tokens", "4"],
    "train": [
        "target=target", "draft_vocab_size=128", "unroll_steps=2", "epochs=1", "batch_size=2", "eval_every=100",
        "held_out=0.3", "eval_responses=2",
    ],
}  # fmt: skip
# What is measured where there is nothing to be found out: two points of each axis, one table of the paper.
AXES = {"budget": (4, 8), "batch": (1, 2), "context": (128, 256), "vocabulary": (64, 128)}
TABLE = "table7"
# Every command that no test of this file runs: the beginning of its line, the reason, and the tests of its like.
NOT_RUN = {
    r"secondguess (bench|quality) .*--peers ": "other engines have environments of their own; tests/test_peers.py",
    r"secondguess serve .*--ray ": "takes a cluster; tests/test_serve_ray.py, and slow ones in tests/test_ray_serve.py",
    r"secondguess capture .*--workers ": "takes a cluster; slow tests in tests/test_ray_capture.py",
    r"secondguess capture .*--endpoint ": "takes vLLM's connector; tests/test_served.py plays it",
    r"torchrun .* (serve|generate) ": "several processes; tests/test_spread.py",
    r"torchrun .* train ": "several processes; tests/test_parallel.py, tests/test_train_command.py",
    r"vllm serve Qwen/Qwen3-8B ": "another engine; its API is played by tests/test_endpoint.py",
    r"vllm serve TARGET ": "another engine; what it does is played by tests/test_served.py",
    r"vllm serve HuggingFaceTB/": "another engine; tests/test_vllm.py, and what scripts/check_vllm.py runs in it",
    r"python -m sglang\.": "another engine, on a GPU; tests/test_sglang.py, tests/test_sglang_hooks.py",
    r"scripts/peers\.sh ": "installs other engines",
    r"\.venv/bin/python scripts/check_vllm\.py ": "runs vLLM, from an environment of its own; tests/test_vllm.py",
    r"\.venv/bin/python scripts/throughput\.py ": "loads a server for half an hour, and is only read",
    r"scripts/perf\.py ": "times the default target, and is only read",
    r"scripts/memory\.py ": "measures the default target; tests/test_scripts.py does so for few tokens",
    r"scripts/(regimes\.py|scale\.py check) ": "takes an hour; tests/test_scripts.py cuts both short",
    r"scripts/arms\.py ": "trains four drafters; tests/test_arms.py",
    r"scripts/paper\.sh ": "takes days; test_scripts_know_what_they_are_given has it say what it would do",
    r"scripts/gpu_check\.sh": "takes a GPU; tests/test_gpu_check.py",
    r"make (demo|bench)$": "takes the default target; tests/test_generate.py and tests/test_bench.py",
    r"make (setup|check test)$": "what makes the environment of this test, and this test",
    r"make clients": "other people's programs; tests/test_clients.py",
    r"(git clone|\. \.venv|pip install|\.venv/bin/pre-commit install)": "changes the machine or the shell",
}
STANDS_FOR = {
    "smollm2-135m": "target",
    "TARGET": "target",
    "D": "drafters/pr",
    "path/to/model": "target",
    "Qwen/Qwen3-8B": "target",
    "meta-llama/Llama-3.1-8B-Instruct": "target",
}
TALK = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"  # a user's turn begins with something
LISTED = [(page, command) for page in PAGES for command in commands(page)]


def test_there_are_commands() -> None:
    """What is not found is not tested."""
    found = {page: sum(command.argv is not None for command in commands(page)) for page in PAGES}
    assert found["README.md"] >= 15
    assert found["docs/quick-start.md"] == 6
    assert found["docs/train.md"] >= 10
    assert {command.argv[0] for _, command in LISTED if command.argv} >= COMMANDS.keys() - {"demo"}


@pytest.mark.parametrize(("page", "command"), LISTED, ids=lambda x: x.text if isinstance(x, Command) else None)
def test_the_parser_knows_every_command(page: str, command: Command) -> None:
    if (argv := command.argv) is not None:
        parser, _ = parser_of(argv[0])
        args = parser.parse(argv[1:])
        if argv[0] == "train" and args.config != Path("run.yaml"):  # of a run folder
            load_config(args.config and ROOT / args.config, args.overrides)
    elif command.words[0] == "make":
        assert {word for word in command.words[1:] if "=" not in word} <= {*make_targets()}
    else:
        for word in command.words:
            assert not word.startswith(("scripts/", "tests/")) or (ROOT / word).exists(), f"no {word}"


OF_SCRIPTS = [
    (word, list(command.words[at + 1 :]))
    for _, command in LISTED
    for at, word in enumerate(command.words)
    if word.startswith("scripts/")
]


@pytest.mark.parametrize(("script", "argv"), OF_SCRIPTS, ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_scripts_know_what_they_are_given(script: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python script has ``parse``; flags that it hands on to a command of ours are read by that one's parser."""
    path = ROOT / script
    if path.suffix == ".py":
        monkeypatch.syspath_prepend(str(path.parent))
        module = importlib.import_module(path.stem)
        handed_on = getattr(module.parse(argv), "flags", None)
        if handed_on is not None:
            parser, _ = parser_of(module.FLAGS_OF[0])
            parser.parse([*module.FLAGS_OF[1:], *handed_on])
    elif script == "scripts/peers.sh":
        assert all(f"\n    {engine})\n" in path.read_text() for engine in argv)
    else:
        subprocess.run(["bash", "-n", path], check=True)
    if script == "scripts/paper.sh":
        environment = os.environ | {"DRY_RUN": "1"}
        subprocess.run(["bash", path, *argv], check=True, env=environment, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: a target, drafters that ship for it, tasks, prompts, a drafter of others."""
    folder = save_tiny(tmp_path_factory.mktemp("docs"))
    byte_tokenizer(TALK).save_pretrained(folder / "target")
    shutil.copytree(folder / "drafters", folder / "shipped" / "smollm2-135m", ignore=lambda *_: {"other"})
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "path" / "to").mkdir(parents=True)
    flags = {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "norm_before_residual": False}
    write_foreign(folder / "path" / "to" / "eagle3-drafter", "eagle3", flags, vocab=257)
    rows = [{"id": str(i), "turns": [f"Say {i}."]} for i in range(1, 25)]
    for path in ("my.jsonl", *(task.file for task in TASKS.values())):
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "runs" / "gpu-check").mkdir(parents=True)
    nothing = {"record": {"machine": {"gpus": []}, "revision": "0"}}  # of a check on a GPU, with nothing measured
    (folder / "runs" / "gpu-check" / "result.json").write_text(json.dumps(nothing))
    prompts = [f"Ask {i}." for i in range(1, 25)]  # no benchmark's
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in prompts))
    (folder / "prompts.txt").write_text("".join(text + "\n" for text in prompts))
    return folder


@pytest.fixture
def workplace(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``tiny``, which becomes the current folder."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SECONDGUESS_DATA", str(tmp_path))
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    return tmp_path


def short(argv: list[str]) -> list[str]:
    """The command on the tiny target, in the form that is run."""
    argv = [STANDS_FOR.get(word, word) for word in argv]
    if argv[:2] == ["reproduce", "all"] and "--plan" not in argv:
        argv[1] = TABLE
    last = max((i for i, word in enumerate(argv) if argv[0] == "train" and "=" in word), default=len(argv) - 1)
    return argv[: last + 1] + SHORTER.get(argv[0], []) + argv[last + 1 :]  # train takes its settings in one place


def excepted(command: Command) -> list[str]:
    """The patterns of ``NOT_RUN`` that it is listed by."""
    return [pattern for pattern in NOT_RUN if re.match(pattern, command.line)]


def runnable(page: str) -> list[Command]:
    return [command for command in commands(page) if not excepted(command)]


@pytest.fixture
def waited_for(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What commands wait for in vain here, but for the server's clients. The URL of a server for ``--endpoint``."""
    monkeypatch.setattr(growth, "AXES", AXES)
    monkeypatch.setattr(synthesize, "MAX_TOKENS", 16)
    monkeypatch.setattr(synthesize.Synthesis, "refusal", lambda *_: None)  # a random model writes no prompts
    monkeypatch.setattr(serve, "start_logging", lambda: None)  # of this whole process
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Api(echo)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server.url
    server.shutdown()
    server.server_close()


def client(asked: list[tuple[str, Any]]) -> Callable[..., bool]:
    """In place of ``listen``: the server starts, is asked what the page asks of it, by path and body, and ends."""

    def listen(app: Any, sock: Any) -> bool:
        sock.close()
        with listening(app) as url:
            return all(httpx.post(url + path, json=body, timeout=120).is_success for path, body in asked)

    return listen


def request_of(curl: Command) -> tuple[str, Any]:
    url, body = httpx.URL(curl.words[1]), curl.words[curl.words.index("-d") + 1]
    return url.path, json.loads(body)


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_commands_run_in_the_order_of_the_page(page: str, waited_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = runnable(page)
    asked = [request_of(command) for command in listed if command.words[0] == "curl"]
    monkeypatch.setattr(listen, "listen", client(asked))
    assert not asked or any(command.argv and command.argv[0] == "serve" for command in listed)
    for command in listed:
        if command.argv is None:
            assert command.words[0] in ("printf", "rm", "curl"), f"{page}: {command.text!r} is run nowhere"
            if command.words[0] != "curl":
                subprocess.run(["sh", "-c", command.text], check=True)
            continue
        argv = [waited_for if word.startswith("http://") else word for word in short(command.argv)]
        monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n/tree\n/race Why not?\n"))
        code = main(argv)
        complains = code == 1 and argv[0] == "doctor"  # of a drafter that has learnt nothing
        assert code == 0 or complains, f"{page}: {command.text}"


def test_what_is_not_run_is_there() -> None:
    """A reason without a command is out of date, and so is one that names a test that is gone."""
    found = [excepted(command) for _, command in LISTED]
    assert all(len(patterns) < 2 for patterns in found)
    assert {pattern for patterns in found for pattern in patterns} == NOT_RUN.keys()
    for reason in NOT_RUN.values():
        for path in re.findall(r"(?:tests|scripts)/\w+\.py", reason):
            assert (ROOT / path).exists(), path
        for name in re.findall(r"test_\w+(?![\w.])", reason):
            assert name in globals(), name


INLINE = [
    (page, code)
    for page, path in PAGES.items()
    for code in re.findall(r"`((?:secondguess|make|scripts/\w+\.\w+)(?: [^`]*)?)`", path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "code"), INLINE, ids=lambda x: x.replace("/", "."))
def test_commands_in_the_text_exist(page: str, code: str) -> None:
    """They are names and outlines, not run; the flags of ours are looked at below."""
    program, *rest = code.split()
    if program == "secondguess":
        assert not rest or rest[0] in COMMANDS, f"{page}: {code}"
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= {*make_targets()}, f"{page}: {code}"
    else:
        source = (ROOT / program).read_text(encoding="utf-8")
        assert all(flag in source for flag in re.findall(r"--[a-z][\w-]*", code)), f"{page}: {code}"


def make_targets() -> list[str]:
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
def test_python_runs(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(workplace / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # which it adds that folder to
    model = AutoModelForCausalLM.from_pretrained("target", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    names: dict[str, Any] = {"model": model, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
    for block in python_blocks(page):
        if "openai" not in block:  # it takes a server
            exec(block.replace("smollm2-135m", "target").replace("path/to/drafter", "drafters/pr"), names)


def test_flags_in_the_text_exist() -> None:
    """Also where no whole command stands."""
    parsers = [parser_of(name)[0] for name in COMMANDS]
    known = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    for page, path in PAGES.items():
        text = re.sub(r"^ {4}.*$", "", path.read_text(encoding="utf-8"), flags=re.M)
        for code in re.findall(r"`(?!scripts/)([^`]+)`", text):  # scripts have flags of their own
            flags = {*re.findall(r"(?<![\w-])(--[a-z][\w-]*)", code)}
            assert flags <= known | {"--no-deps", "--head", "--generation-config"}, f"{page}: {code}"  # pip, ray, vllm


def test_the_doctors_sample_has_all_its_lines() -> None:
    """Its numbers are of one day."""
    [sample] = [block for block in blocks("docs/doctor.md") if block[0].startswith("check ")]
    rows = [re.match(r"(\w+(?: \w+)?) {2,}(\w+) {2,}\S", line) for line in sample[1:]]
    shown: dict[str, Any] = {row[1]: row[2] for row in rows if row}
    assert [*shown] == ["checkpoint", *CHECKS, "acceptance"]
    assert {*shown.values()} <= {*STYLES}
    found = [Finding(name, cast("Any", verdict), "") for name, verdict in shown.items()]
    assert conclusion(found) in sample


def test_what_is_said_of_known_faults_is_said_in_a_test() -> None:
    """Or the list of docs/doctor.md would promise what nobody asserts."""
    tests = "\n".join(texts_in(path) for path in sorted((ROOT / "tests").glob("test_*.py")))
    rows = re.findall(r"^\| ([A-Z]+) \| .* \| (.*) \|$", PAGES["docs/doctor.md"].read_text(encoding="utf-8"), re.M)
    assert {kind for kind, _ in rows} == {"CFG", "VOCAB", "LOAD", "IDX", "ROPE", "LEN", "DATA"}
    for _, said in rows:
        for words in re.findall(r"`([^`]+)`", said):
            assert words in tests.replace("\\.", "."), words


def texts_in(path: Path) -> str:
    """The strings of a module, but for docstrings: what is said in a comment is not asserted."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(str(node.value) for node in strings if id(node) not in docstrings)


# Links, navigation, pages made from code


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(hooks: ModuleType) -> dict[str, str]:
    """Every page of the site, by its path."""
    made = {page: hooks.whole(source) for page, source in hooks.WHOLE.items()}
    made |= {"reference/commands.md": hooks.commands_page(), "reference/configuration.md": hooks.configuration_page()}
    return made | {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def test_links_lead_somewhere(site: dict[str, str]) -> None:
    for page, text in site.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            if path.endswith(".md") or not path:
                assert (path or page) in site, f"{page}: {link}"
                assert not anchor or anchor in anchors(site[path or page]), f"{page}: {link}"
            else:
                assert (ROOT / "docs" / path).exists(), f"{page}: {link}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """mkdocs.yml is strict, which knows more of links and anchors than this file. In mkdocs' own theme: it is there."""
    import mkdocs.config
    from mkdocs.commands.build import build

    own: dict[str, Any] = {"theme": {"name": "mkdocs"}, "site_dir": str(tmp_path / "site")}
    config = mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), **own)
    assert config.strict
    build(config)
    assert (tmp_path / "site" / "reference" / "commands" / "index.html").exists()


def test_every_page_is_in_the_navigation(site: dict[str, str]) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    assert sorted(listed) == sorted(site)


def test_references_are_whole(site: dict[str, str], hooks: ModuleType) -> None:
    page = site["reference/commands.md"]
    for name in COMMANDS:
        parser, _ = parser_of(name)
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        flags = {flag for action in parser._actions for flag in action.option_strings}
        assert flags <= {*re.findall(r"`(-[\w-]+)`", section)}, name
    configuration = site["reference/configuration.md"]
    assert "| `budget` | int or auto | `48` |" in configuration
    assert "| `num_steps` | int | `8` | drafter forwards per cycle (gamma) |" in configuration
    assert "| `responses` | str | required | JSONL file" in configuration
    assert "`novel_only` the same" in configuration
    for text in (page, configuration):
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert not [row for row in rows if "%%" in row or "<factory>" in row or "MISSING" in row]


def test_every_variable_is_told_of(hooks: ModuleType) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    used = {*re.findall(r"[\"'](SECONDGUESS_[A-Z_]+)[\"']", sources)} - {"SECONDGUESS_"}
    assert used == {name for name in hooks.VARIABLES if name.startswith("SECONDGUESS_")}
