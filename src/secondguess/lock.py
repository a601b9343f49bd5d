"""One writer per folder."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from secondguess.atomic import sweep
from secondguess.errors import UserError


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Meanwhile this process alone writes in ``folder``, which is made if need be.

    What a killed writer left half done there is removed. Raises UserError if another process writes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:  # the lock goes with the process, however it ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes in {folder}: wait for it, or choose another folder") from None
        sweep(folder)
        yield
