"""Temporary files: those of killed processes go, those of others stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from secondguess.atomic import replacing, temporary_name


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here, alive = platform.node(), os.getppid()
    left = [f".shard.{here}.{dead.pid}.partial", f".a.b.json.{here}.{dead.pid}.partial"]
    others = [
        f".shard.{here}.{alive}.partial",  # at work
        f".shard.elsewhere.{dead.pid}.partial",  # perhaps at work on another machine
        f"shard.{here}.{dead.pid}.partial",  # not one of our names
        ".shard.partial",
    ]
    for name in (*left, *others):
        (tmp_path / name).touch()
    with replacing(tmp_path / "new.json") as temporary:
        assert temporary == temporary_name(tmp_path / "new.json")
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"new.json", *others}
