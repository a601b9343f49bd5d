"""Errors that are the user's to fix."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable
from importlib.metadata import distribution
from urllib.parse import unquote, urlsplit


class UserError(ValueError):
    """A mistake in what the user gave. Its text is one line: what was wrong and what to change.

    The command line prints it and exits 2. A plain ``ValueError`` from deep inside a library stays a failure of the
    work (exit 1), so code that rejects user input raises this class. ``field``: the one that is to blame, where a
    caller that knows it by the same name may want to point at it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def require(ok: bool, message: str, field: str | None = None) -> None:
    """Raise UserError with ``message`` unless ``ok``."""
    if not ok:
        raise UserError(message, field)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean NAME?"`` for the name nearest to ``word``, or an empty string if none is near."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def install(extra: str) -> str:
    """The command that adds an extra to this installation: one that came from a checkout or a wheel is in no index."""
    came_from = json.loads(distribution("secondguess").read_text("direct_url.json") or "{}")
    url = urlsplit(came_from.get("url", ""))
    editable = "-e " * came_from.get("dir_info", {}).get("editable", False)
    package = unquote(url.path) if url.scheme == "file" else "secondguess"
    return f"pip install {editable}{shlex.quote(f'{package}[{extra}]')}"
