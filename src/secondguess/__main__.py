"""``python -m secondguess`` is the ``secondguess`` command."""

from __future__ import annotations

from secondguess.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
