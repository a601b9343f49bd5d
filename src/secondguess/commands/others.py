"""Which methods a request may ask for where one is chosen for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from secondguess.methods import Method

if TYPE_CHECKING:
    from secondguess.target.hf import HFTarget


def others(method: Method, drafter: str | None, target: HFTarget) -> list[str]:
    """Besides ``method``: those without a drafter, and EAGLE-3.1 where there is a PR drafter."""
    from secondguess.drafter.shipped import shipped_for

    names = [name for name in ("ar", "ngram") if name != method.name]
    if method.tree.budget == "auto":  # which weighs probabilities, and prompt lookup has none
        names = ["ngram:budget=8" if name == "ngram" else name for name in names]
    if method.name == "pr" and (drafter is not None or "eagle3.1" in shipped_for(target.embedding)):
        names.append("eagle3.1")
    return names
