"""The JSON file that a command writes beside its table, with the record of what made it."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from secondguess.atomic import temporary_name, writing
from secondguess.machine import describe

START = b'{\n  "record": {'  # of every file that write_json wrote
NUMBERS = re.compile(r"\[\n[^][{}\"]+\]")  # a list of them, one a line: no text in JSON holds a line's end
PACKAGES = ("secondguess", "torch", "transformers")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the result to FILE, for machines")


def make_record(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What one needs to repeat a result: command, code revision, versions, machine, time (UTC)."""
    return {
        "command": shlex.join(["secondguess", *(sys.argv[1:] if argv is None else argv)]),
        "revision": _revision(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "machine": describe(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def passport(record: Mapping[str, Any]) -> str:
    """The line above a table in Markdown: what made it."""
    return f"`{record['command']}`, revision {record['revision']}, {record['machine']['cpu']}, {record['time']}"


def write_json(
    path: Path, record: Mapping[str, Any], rows_key: str, rows: Sequence[Mapping[str, Any]], **more: Any
) -> None:
    """Write ``{"record": record, rows_key: rows, **more}``: the file is whole, old or new. Numbers share a line."""
    text = json.dumps({"record": record, rows_key: rows, **more}, indent=2, ensure_ascii=False) + "\n"
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def output_file(text: str, start: bytes = START) -> Path:
    """What a flag that names a file to write reads: a place that cannot be written is found out before the work.

    A file that is there may be replaced if it begins with ``start``, as an earlier result does.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {path.parent}; create it first")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return path
    if path.exists() and path.stat().st_size and not path.read_bytes().startswith(start):
        raise argparse.ArgumentTypeError(f"{text} exists and is no result of an earlier run; name another file")
    try:
        temporary_name(path).touch()
        temporary_name(path).unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def _revision() -> str:
    """The commit of the checkout that this file is tracked in (``-dirty`` if it was changed), else the version."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return version("secondguess")
