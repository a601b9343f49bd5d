"""Keeps a scheduler going while anybody listens, and tells each listener its news.

A step at a time is handed to the engine's thread, so that whatever else is asked of it meanwhile (a new request, the
end of one) is done before the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from secondguess.engine.sequence import Sequence
from secondguess.engine.thread import submit
from secondguess.types import Delta

# Hears of a request's tokens until a delta has its output, or of the error that ended it.
Listener = Callable[[Delta | Exception], None]


class Pump:
    """Everything here runs on the engine's thread."""

    def __init__(self, step: Callable[[], None], news_of: Callable[[Sequence], Delta | None]) -> None:
        self.step, self.news_of = step, news_of
        self.listeners: dict[Sequence, Listener] = {}
        self.turning = False

    def listen(self, sequence: Sequence, listener: Listener) -> None:
        self.listeners[sequence] = listener
        if not self.turning:
            self.turning = True
            submit(self._turn)

    def forget(self, sequence: Sequence) -> None:
        self.listeners.pop(sequence, None)

    def _turn(self) -> None:
        error = self._step()
        for sequence, listener in list(self.listeners.items()):
            if error and sequence.finish_reason == "abort":
                self.forget(sequence)
                listener(error)
            elif delta := self.news_of(sequence):
                if delta.output:
                    self.forget(sequence)
                listener(delta)
        self.turning = bool(self.listeners)
        if self.turning:
            submit(self._turn)

    def _step(self) -> Exception | None:
        """The error goes to those whom it ended; the others' requests are whole."""
        try:
            self.step()
        except Exception as error:
            return error
        return None
