"""Errors that are the user's to fix."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave. Its text is one line: what was wrong and what to change.

    The command line prints it and exits 2. A plain ``ValueError`` from deep inside a library stays a failure of the work
    (exit 1), so code that rejects user input raises this class.
    """
