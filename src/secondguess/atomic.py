"""Files that are whole: the old one or the new one, never half of it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from secondguess.errors import UserError


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary name beside ``path``, this process's own; what lies there becomes ``path`` if the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Generator[Path]:
    """As ``replacing``, but a device, pipe or link (``/dev/stdout``) is written in place: renaming would replace it."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    with replacing(path) as temporary:
        yield temporary


def check_folder(folder: Path) -> None:
    """Raise UserError if ``folder`` can be no folder because a file stands in its way."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"{folder} cannot be a folder: {nearest} is a file")
