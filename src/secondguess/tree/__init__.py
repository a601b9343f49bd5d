"""Draft trees as pure, batched tensor functions: no network and no cache in here."""

from secondguess.tree.grow import grow
from secondguess.tree.layout import ancestors_or_self
from secondguess.tree.rows import DraftRows, Offers, Root
from secondguess.tree.walk import child_with, walk

__all__ = ["DraftRows", "Offers", "Root", "ancestors_or_self", "child_with", "grow", "walk"]
