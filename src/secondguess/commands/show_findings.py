"""What the doctor found, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from secondguess.drafter.checks import Finding

STYLES = {"ok": "green", "unknown": "dim", "warning": "yellow", "error": "bold red"}


def table(findings: Sequence[Finding]) -> Table:
    """A row per finding, with what to do about it below."""
    shown = Table("check", "verdict", "found", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for f in findings:
        fix = f"\n-> {f.fix}" if f.fix and f.verdict != "ok" else ""
        shown.add_row(Text(f.name), Text(f.verdict, STYLES[f.verdict]), Text(f.found + fix))
    return shown


def conclusion(findings: Sequence[Finding]) -> str:
    """One line."""
    count = {verdict: sum(f.verdict == verdict for f in findings) for verdict in STYLES}
    if count["error"]:
        return "the drafter does not fit"
    if count["warning"]:
        return f"the drafter may not fit: {count['warning']} warning{'s' if count['warning'] > 1 else ''}"
    unknown = f", as far as the checkpoint tells ({count['unknown']} unknown)" if count["unknown"] else ""
    return f"the drafter fits{unknown}"
