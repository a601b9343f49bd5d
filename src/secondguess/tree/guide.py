"""How far a draft goes, and who decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from secondguess.config import TreeConfig
from secondguess.tree.candidates import Candidates


class Guide(Protocol):
    """Is asked between the forwards of one draft."""

    def goes_on(self, pool: Candidates) -> bool:
        """Whether the best fresh candidates are forwarded."""
        ...

    def budgets(self, pool: Candidates) -> list[int]:
        """Of each request, the nodes that its tree shall have, the root not counted."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every forward, and trees of one size."""

    budget: int

    def goes_on(self, pool: Candidates) -> bool:
        return True

    def budgets(self, pool: Candidates) -> list[int]:
        return [self.budget] * len(pool.keys_RC)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one draft is made."""

    config: TreeConfig
    guide: Guide
