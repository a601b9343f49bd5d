"""What made an answer file, beside it: ``answers.made.json`` has the target and the settings of each session.

A file has the answers of one target: a drafter that is trained on several guesses none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.atomic import replacing
from secondguess.errors import UserError


@dataclass(frozen=True, slots=True)
class Made:
    """``fingerprint``: of the target's weights; None where a server has them. ``settings``: how answers are drawn."""

    target: str
    fingerprint: str | None
    settings: Mapping[str, Any]

    def beside(self, out: Path, num_answers: int, say: Callable[[str], None]) -> None:
        """Keep it beside ``out``, whose ``num_answers`` answers stay as they are.

        ``say`` hears of settings that they were drawn with otherwise. Raises UserError if they are another target's.
        """
        path = out.with_suffix(".made.json")
        before = read(path) if num_answers else None
        if before and not self._is_of(before):
            raise UserError(f"{out} holds answers of another target, {before['target']}: give another --out")
        sessions = before["sessions"] if before else []
        last = sessions[-1] if sessions else {**self.settings}
        if changed := [name for name, value in self.settings.items() if last.get(name) != value]:
            theirs = ", ".join(f"{name} {last.get(name)}" for name in changed)
            say(f"{num_answers} answers that are there were drawn with {theirs}: they stay as they are")
        if changed or not sessions:
            sessions = [*sessions, {**self.settings}]
        made = {"target": self.target, "fingerprint": self.fingerprint, "sessions": sessions}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(made, indent=1) + "\n")

    def _is_of(self, before: Mapping[str, Any]) -> bool:
        if self.fingerprint and before["fingerprint"]:
            return self.fingerprint == before["fingerprint"]
        return self.target == before["target"]


def read(path: Path) -> dict[str, Any] | None:
    """None if there is no such file, as beside answers of an earlier version."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        return {name: found[name] for name in ("target", "fingerprint", "sessions")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not say what made the answers ({error!r}): remove it") from error
