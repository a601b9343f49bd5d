"""A folder that is there as a whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from secondguess.atomic import check_folder, temporary_name
from secondguess.errors import UserError


def check_new(folder: Path) -> None:
    """Raises UserError if something is there, or can never be."""
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name a new folder")


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """A temporary folder, which becomes ``folder`` if the block ends well. Raises UserError unless that is free."""
    check_new(folder)
    final = folder.absolute()
    temporary = temporary_name(final)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
