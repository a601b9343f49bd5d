"""Keeps a scheduler going while anybody listens, and tells each listener its news.

A step at a time is handed to the engine's thread, so that whatever else is asked of it meanwhile (a new request, the
end of one) is done before the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from secondguess.engine.sequence import Sequence
from secondguess.engine.thread import submit
from secondguess.types import Delta

log = logging.getLogger(__name__)

# Hears of a request's tokens until a delta has its output, or of the error that ended it.
Listener = Callable[[Delta | Exception], None]


class Pump:
    """Everything here runs on the engine's thread. Whatever goes wrong for one listener, the others hear of theirs."""

    def __init__(
        self,
        step: Callable[[], None],
        news_of: Callable[[Sequence], Delta | None],
        abort: Callable[[Sequence], None],
    ) -> None:
        self.step, self.news_of, self.abort = step, news_of, abort
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
        try:
            error = self._step()
            if error and not any(s.finish_reason == "abort" for s in self.listeners):
                log.error("a step failed, and ended no request that is listened to", exc_info=error)
            for sequence, listener in list(self.listeners.items()):
                try:
                    self._tell(sequence, listener, error)
                except Exception as fault:
                    self._drop(sequence, listener, fault)
        finally:
            self.turning = bool(self.listeners)
            if self.turning:
                submit(self._turn)

    def _tell(self, sequence: Sequence, listener: Listener, error: Exception | None) -> None:
        if sequence.finish_reason == "abort" and (fault := sequence.fault or error):
            self.forget(sequence)
            listener(fault)
        elif delta := self.news_of(sequence):
            if delta.output:
                self.forget(sequence)
            listener(delta)

    def _drop(self, sequence: Sequence, listener: Listener, fault: Exception) -> None:
        """Its text cannot be told, or there is nobody whom it could be told."""
        log.error("a request is dropped, because its news could not be told", exc_info=fault)
        self.forget(sequence)
        with suppress(Exception):
            self.abort(sequence)
        with suppress(Exception):
            listener(fault)

    def _step(self) -> Exception | None:
        """The error goes to those whom it ended; the others' requests are whole."""
        try:
            self.step()
        except Exception as error:
            return error
        return None
