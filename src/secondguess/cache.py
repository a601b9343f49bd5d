"""Where the package keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$SECONDGUESS_CACHE``, else ``$XDG_CACHE_HOME/secondguess``, else ``~/.cache/secondguess``."""
    if own := os.environ.get("SECONDGUESS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secondguess"
