"""Names of folders that nobody chose."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path


def stamped(parent: Path, stem: str) -> Path:
    """A folder in ``parent`` that is not there yet, called after ``stem`` and now: two runs may begin in one second."""
    first = parent / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (first.with_name(f"{first.name}-{n}" if n > 1 else first.name) for n in count(1))
    return next(name for name in names if not name.exists())
