"""Files and folders replaced as a whole. Temporary ones: those of killed processes go, those of others stay."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from dead_pid import dead_pid
from secondguess.atomic import replacing, replacing_folder, sweep, temporary_name
from secondguess.commands.stamped import stamped


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


def test_folders_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    left = tmp_path / f".drafter.{platform.node()}.{dead_pid()}.partial"
    left.mkdir()
    (left / "config.json").touch()
    sweep(tmp_path)
    assert not left.exists()


def test_a_folder_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    for name in ("old", "new"):
        with replacing_folder(folder) as temporary:
            (temporary / name).touch()
        assert [path.name for path in folder.iterdir()] == [name]
    with pytest.raises(FileNotFoundError), replacing_folder(folder) as temporary:
        (temporary / "half" / "of it").touch()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_folders_called_after_one_second_differ(tmp_path: Path) -> None:
    made = [stamped(tmp_path, "bench")]
    for _ in range(30):  # within a second, or two
        made[-1].mkdir()
        made.append(stamped(tmp_path, "bench"))
    assert len(set(made)) == 31
    assert not made[-1].exists()
