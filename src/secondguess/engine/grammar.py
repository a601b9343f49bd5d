"""What the engine asks of a grammar: which tokens may come next, as the text grows.

A walk down a draft tree is told of each token that it takes, so a grammar is asked at every node for the node's own
path, and nothing is ever taken back: the walk takes only tokens that are emitted.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Follower(Protocol):
    """Follows one text through its grammar. It never raises an error, which would end the others' requests, too."""

    @property
    def fault(self) -> Exception | None:
        """Why the request cannot go on: it has lost the text, or holds up the others. UserError: by its own grammar."""
        ...

    def allowed(self) -> Tensor | None:
        """bool [V] on the CPU: the tokens that may come next, one at least. None: all may, the text has ended."""
        ...

    def accept(self, token: int) -> None:
        """The text goes on with ``token``. After its end, nothing changes."""
        ...


class Grammar(Protocol):
    """A grammar that is ready for use, by any number of texts at once."""

    def start(self) -> Follower: ...
