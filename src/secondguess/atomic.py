"""Files that are whole: the old one or the new one, never half of it."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from secondguess.errors import UserError


def temporary_name(path: Path) -> Path:
    """Beside ``path``, this process's own. The machine is named too: others may write to the same disk."""
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary name; what lies there becomes ``path`` if the block ends well.

    What a killed process of this machine has left in the folder under such names is removed.
    """
    _sweep(path.parent.absolute())
    temporary = temporary_name(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Generator[Path]:
    """As ``replacing``, of a folder: what was in it before is gone. Between two renames there is, for an instant, none.

    What a killed process left goes when ``folder``'s parent is swept.
    """
    temporary, old = temporary_name(folder), temporary_name(folder.with_name(f"{folder.name}.old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    finally:
        for path in (temporary, old):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Generator[Path]:
    """As ``replacing``, but a device, pipe or link (``/dev/stdout``) is written in place: renaming would replace it."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    with replacing(path) as temporary:
        yield temporary


def sweep(folder: Path) -> None:
    """Remove what killed processes of this machine have left in the folder under temporary names."""
    ours = re.compile(rf"\..+\.{re.escape(platform.node())}\.(\d+)\.partial")
    for path in folder.glob(".*.partial"):
        if (left := ours.fullmatch(path.name)) and not _is_running(int(left[1])):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


_sweep = cache(sweep)  # once per process: a run may write thousands of files into a folder


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def check_folder(folder: Path) -> None:
    """Raise UserError if ``folder`` can be no folder because a file stands in its way."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"{folder} cannot be a folder: {nearest} is a file")


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that is only ever added to. One that a kill cut short is cut off, nothing else touched."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return whole.splitlines()
