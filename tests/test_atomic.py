"""Temporary files: those of killed processes go, those of others stay."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from dead_pid import dead_pid
from secondguess.atomic import replacing, temporary_name


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    dead, here, alive = dead_pid(), platform.node(), os.getppid()
    left = [f".shard.{here}.{dead}.partial", f".a.b.json.{here}.{dead}.partial"]
    others = [
        f".shard.{here}.{alive}.partial",  # at work
        f".shard.elsewhere.{dead}.partial",  # perhaps at work on another machine
        f"shard.{here}.{dead}.partial",  # not one of our names
        ".shard.partial",
    ]
    for name in (*left, *others):
        (tmp_path / name).touch()
    with replacing(tmp_path / "new.json") as temporary:
        assert temporary == temporary_name(tmp_path / "new.json")
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"new.json", *others}
