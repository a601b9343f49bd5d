"""The command line: one line and the right exit code for every mistake, flags from configs, whole JSON files."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secondguess import cli, commands, errors
from secondguess.cli import Parser, main
from secondguess.commands import record
from secondguess.commands.options import add_dataclass, from_args
from secondguess.errors import UserError, did_you_mean, install


@dataclass(frozen=True, kw_only=True)
class Settings:
    budget: int = field(default=48, metadata={"help": "nodes; 100 % of them"})
    top_p: float = 1.0
    seed: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    stop: tuple[str, ...] = ()
    stream: bool = True

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget}")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Namespace], int]], None]:
    """Replaces the module that every command name imports by one that takes ``Settings`` and runs a function."""

    def install(run: Callable[[Namespace], int]) -> None:
        module = SimpleNamespace(add_arguments=lambda parser: add_dataclass(parser, Settings), run=run)
        monkeypatch.setattr(cli, "import_module", lambda name: module)

    return install


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("secondguess: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no command given"),
        (["bnch"], "unknown command 'bnch'; did you mean bench?"),
        (["zzz"], "unknown command 'zzz' (see"),
        (["--versoin"], "unknown flag --versoin; did you mean --version?"),
        (["bench", "--budgett", "3"], "unknown flag --budgett; did you mean --budget?"),
        (["bench", "--budgett=3"], "unknown flag --budgett; did you mean --budget?"),
        (["bench", "--budge", "3"], "unknown flag --budge; did you mean --budget?"),  # no abbreviations
        (["bench", "extra"], "unexpected argument 'extra'"),
        (["bench", "--budget", "many"], "argument --budget: invalid int value: 'many'"),
        (["bench", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["bench", "--budget", "0"], "budget must be at least 1, got 0"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(argv, said, command, capsys) -> None:
    command(lambda args: from_args(Settings, args).budget and 0)
    assert main(argv) == 2
    assert said in one_line(capsys)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such target: x;\ntry smollm2-135m"), 2, "no such target: x; try smollm2-135m\n"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), 1, "a.json: No such file or directory (SECOND"),
        (PermissionError(13, "Permission denied", "/out.json"), 1, "secondguess: /out.json: Permission denied (SECOND"),
        (OSError("no space"), 1, "OSError: no space (SECONDGUESS"),
        (ValueError("shapes differ"), 1, "ValueError: shapes differ (SECONDGUESS_DEBUG=1"),
        (RuntimeError("\nout of memory\nframe 0\nframe 1"), 1, "RuntimeError: out of memory (SECONDGUESS"),
        (MemoryError(), 1, "MemoryError: no message"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(error, code, said, command, capsys) -> None:
    def run(args: Namespace) -> int:
        raise error

    command(run)
    assert main(["generate"]) == code
    assert said in one_line(capsys)


def test_debug_adds_the_traceback(command, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SECONDGUESS_DEBUG", "1")
    command(lambda args: int("x"))
    assert main(["generate"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_exit_code_of_a_command_is_passed_on(command) -> None:
    command(lambda args: 7)
    assert main(["demo"]) == 7


def test_arguments_after_the_command_belong_to_it(command, capsys) -> None:
    command(lambda args: 0)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert stop.value.code == 0
    assert "--budget INT" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
from secondguess.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""
MODULES = [module.name.removesuffix("_") for module in pkgutil.iter_modules(commands.__path__)]
BUILT = [name for name in MODULES if name in cli.COMMANDS]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--version"], "secondguess "),
        (["--help"], "generate"),
        *(([name, "--help"], cli.COMMANDS[name]) for name in BUILT),
    ],
)
def test_help_and_version_do_not_import_torch(argv, said) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_python_dash_m_runs_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "secondguess", "no-such"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("secondguess: unknown command 'no-such'")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_leaves_is_no_failure_to_tell_of(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "secondguess", "train", "--print-config", "responses=a", "out=b"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


settings = st.builds(
    Settings,
    budget=st.integers(1, 10**9),
    top_p=st.floats(allow_nan=False),
    seed=st.none() | st.integers(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    stop=st.lists(st.text(st.characters(exclude_characters="-"), min_size=1), max_size=3).map(tuple),
    stream=st.booleans(),
)


@given(settings)
def test_flags_round_trip(wanted: Settings) -> None:
    argv = [f"--budget={wanted.budget}", f"--top-p={wanted.top_p}", f"--dtype={wanted.dtype}"]
    argv += [] if wanted.seed is None else [f"--seed={wanted.seed}"]
    argv += [f"--stop={text}" for text in wanted.stop]
    argv += ["--stream" if wanted.stream else "--no-stream"]
    parser = Parser("test", "")
    add_dataclass(parser, Settings)
    assert from_args(Settings, parser.parse(argv)) == wanted


def test_flags_show_help_and_default() -> None:
    parser = Parser("test", "")
    add_dataclass(parser, Settings, only=("budget", "seed"))
    text = parser.format_help()
    assert "nodes; 100 % of them (default: 48)" in text
    assert "--seed" in text
    assert "--top-p" not in text


def test_fields_that_are_not_flags_are_given_directly() -> None:
    parser = Parser("test", "")
    add_dataclass(parser, Settings, only=("budget",))
    assert from_args(Settings, parser.parse(["--budget", "5"]), seed=3) == Settings(budget=5, seed=3)


def test_nearest_name() -> None:
    assert did_you_mean("eagle3", ["ar", "eagle3.1", "pr"]) == "; did you mean eagle3.1?"
    assert did_you_mean("qqq", ["ar", "eagle3.1", "pr"]) == ""


@pytest.mark.parametrize(
    ("came_from", "command"),
    [
        (None, "pip install 'secondguess[plots]'"),
        ({"url": "https://here.org/it.git", "vcs_info": {"vcs": "git"}}, "pip install 'secondguess[plots]'"),
        ({"url": "file:///a/b%20c", "dir_info": {"editable": True}}, "pip install -e '/a/b c[plots]'"),
        ({"url": "file:///a/b", "dir_info": {}}, "pip install '/a/b[plots]'"),
        ({"url": "file:///a/it-1.whl", "archive_info": {}}, "pip install '/a/it-1.whl[plots]'"),
    ],
)
def test_an_extra_is_added_to_the_installation_that_is_there(came_from, command: str, monkeypatch) -> None:
    found = SimpleNamespace(read_text=lambda name: came_from and json.dumps(came_from))
    monkeypatch.setattr(errors, "distribution", lambda name: found)
    assert install("plots") == command


ROWS = [{"method": "pr", "acceptance_length": 2.5}, {"method": "ar", "acceptance_length": 1.0}]


def test_json_holds_record_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    record.write_json(path, record.make_record(["bench", "a b"]), "rows", ROWS)
    content = json.loads(path.read_text())
    assert content["rows"] == ROWS
    assert set(content["record"]) == {"command", "revision", "versions", "machine", "time"}
    assert content["record"]["command"] == "secondguess bench 'a b'"
    assert content["record"]["versions"]["torch"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_numbers_of_a_list_share_a_line_and_texts_stay(tmp_path: Path) -> None:
    rows = [{"text": "[\n1,\n 2]", "ids": [1, 2], "shares": [[0.5, None], []], "names": ["a"]}]
    record.write_json(tmp_path / "out.json", {}, "rows", rows)
    text = (tmp_path / "out.json").read_text()
    assert json.loads(text)["rows"] == rows
    assert '"ids": [ 1, 2 ],\n' in text
    assert "        [ 0.5, null ],\n" in text


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    record.write_json(path, {}, "rows", ROWS)
    before = path.read_bytes()

    def half_written(self: Path, text: str, encoding: str) -> None:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(OSError, match="No space left"):
        record.write_json(path, {}, "rows", [])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_json_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    record.write_json(link, {}, "rows", ROWS)
    assert link.is_symlink()
    assert json.loads(real.read_text())["rows"] == ROWS


@pytest.mark.parametrize(
    ("file", "said"),
    [("no/out.json", "no folder"), (".", "is a folder"), ("/proc/out.json", "cannot be written: ")],
)
def test_a_json_path_that_cannot_be_written_is_found_out_first(file, said, tmp_path: Path) -> None:
    parser = Parser("test", "")
    record.add_json(parser)
    assert parser.parse([f"--json={tmp_path / 'out.json'}"]).json == tmp_path / "out.json"
    with pytest.raises(UserError, match=said):
        parser.parse([f"--json={tmp_path / file}"])


def test_revision_outside_a_checkout_is_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    assert record.make_record([])["revision"] == record.version("secondguess")


def test_json_does_not_overwrite_what_is_no_result(tmp_path: Path) -> None:
    own, other, empty = tmp_path / "own.json", tmp_path / "task.jsonl", tmp_path / "empty.json"
    record.write_json(own, record.make_record(["bench"]), "rows", [])
    other.write_text('{"id": "1", "turns": ["Hi"]}\n')
    empty.touch()
    parser = Parser("p", "")
    record.add_json(parser)
    for path in (own, empty, tmp_path / "new.json"):
        assert parser.parse(["--json", str(path)]).json == path
    with pytest.raises(UserError, match=r"task\.jsonl exists and is no result of an earlier run"):
        parser.parse(["--json", str(other)])
    with pytest.raises(UserError, match="cannot be written"):
        parser.parse(["--json", str(tmp_path / ("x" * 250))])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.json", "own.json", "task.jsonl"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "2>/dev/full"])
def test_closed_streams_change_no_exit_code(closed: str) -> None:
    command = f"{sys.executable} -m secondguess generate x - --method nosuch {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 2
