"""The documentation: every command in it is run, links lead somewhere, what is made from code is whole.

Commands run page by page, in the order of the page, on a tiny target, with flags added that make them short
(``SHORTER``). What cannot run in a test is read by its real parser, and ``ONLY_READ`` says why.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, dynamic_module_utils

from docs_commands import PAGES, ROOT, Command, commands, python_blocks
from foreign_drafter import write_foreign
from secondguess.bench.tasks import TASKS
from secondguess.cli import COMMANDS, main, parser_of
from secondguess.drafter import shipped
from secondguess.train.config import load_config
from tiny_folder import save_tiny

# Last of two flags or settings wins.
SHORTER: dict[str, list[str]] = {
    "generate": ["--max-new-tokens", "8"],
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
ONLY_READ = {
    r"growth ": "it times cycles of all sizes; tests/test_growth.py",
    r"capture .*--workers ": "it takes a Ray cluster; tests/test_ray_capture.py",
    r"chat ": "it reads a terminal; tests/test_chat.py",
    r"serve ": "it does not end; tests/test_stranger.py serves",
    r".*--synthesize ": "a random model writes no prompts; tests/test_synthesize.py",
    r".*--endpoint ": "it takes a server; tests/test_endpoint.py",
    r".*--peers ": "other engines have environments of their own; tests/test_peers.py",
    r"reproduce .*--check": "it follows a measurement, which is only planned here; tests/test_reproduce_command.py",
}
# Programs that are not ours, and the rest of a shell.
OTHERS = {"git", "make", "curl", "printf", "rm", "pip", "vllm", "torchrun", "scripts/peers.sh", "scripts/paper.sh"}
OTHERS |= {".", "python", "scripts/gpu_check.sh", "scripts/gpu_pipeline.sh", "scripts/arms.py", "scripts/perf.py"}
OTHERS.add("scripts/memory.py")
SCRIPTS = (".venv/bin/pre-commit", ".venv/bin/python")
STANDS_FOR = {
    "smollm2-135m": "target",
    "TARGET": "target",
    "D": "drafters/pr",
    "path/to/model": "target",
    "Qwen/Qwen3-8B": "target",
    "meta-llama/Llama-3.1-8B-Instruct": "target",
}
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
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in command.words[1:] if "=" not in word} <= {*targets}
    elif command.words[0] == "curl":
        json.loads(command.words[command.words.index("-d") + 1])
    else:
        assert command.words[0] in (*OTHERS, *SCRIPTS), f"{page}: what is {command.text!r}?"
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
    shutil.copytree(folder / "drafters", folder / "shipped" / "smollm2-135m", ignore=lambda *_: {"other"})
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "path" / "to").mkdir(parents=True)
    flags = {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "norm_before_residual": False}
    write_foreign(folder / "path" / "to" / "eagle3-drafter", "eagle3", flags, vocab=257)
    rows = [{"id": str(i), "turns": [f"Say {i}."]} for i in range(1, 25)]
    for path in ("my.jsonl", *(task.file for task in TASKS.values())):
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    if argv[0] == "reproduce" and "--plan" not in argv:
        argv.append("--plan")
    if argv[0] == "reproduce":
        argv += ["--limit", "2", "--live-limit", "1", "--max-new-tokens", "8", "--dtype", "float32"]
    last = max((i for i, word in enumerate(argv) if argv[0] == "train" and "=" in word), default=len(argv) - 1)
    return argv[: last + 1] + SHORTER.get(argv[0], []) + argv[last + 1 :]  # train takes its settings in one place


def only_read(argv: list[str]) -> bool:
    return any(re.match(pattern, " ".join(argv)) for pattern in ONLY_READ)


def runnable(page: str) -> Iterator[Command]:
    """Commands of ours but those that are only read, and what makes and removes their files."""
    for command in commands(page):
        ours = command.argv is not None and command.words[0] != "torchrun" and not only_read(command.argv)
        if ours or command.words[0] in ("printf", "rm"):
            yield command


@pytest.mark.parametrize("page", [page for page in PAGES if any(runnable(page))])
def test_commands_run_in_the_order_of_the_page(page: str, workplace: Path) -> None:
    for command in runnable(page):
        if command.argv is None:
            subprocess.run(["sh", "-c", command.text], check=True)
        else:
            code = main(short(command.argv))
            complains = code == 1 and command.argv[0] == "doctor"  # of a drafter that has learnt nothing
            assert code == 0 or complains, f"{page}: {command.text}"


def test_what_is_only_read_is_there() -> None:
    """A reason without a command is out of date."""
    ours = [" ".join(command.argv) for _, command in LISTED if command.argv]
    for pattern in ONLY_READ:
        assert any(re.match(pattern, text) for text in ours), pattern


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
