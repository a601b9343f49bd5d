"""Whether answers begin as those that a drafter was trained on: a switch such as ``enable_thinking`` decides that."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from secondguess.prompts import ends_with

log = logging.getLogger(__name__)


class Openings:
    """Hears every conversation of an LLM, and tells the log of the first that leads up to its answer otherwise.

    ``starts``: what the training's prompts of each drafter ended with; None where that is not known.
    """

    def __init__(self, tokenizer: Any, starts: Iterable[str | None]) -> None:
        self.tokenizer, self.starts, self.told = tokenizer, sorted({start for start in starts if start}), False

    def hear(self, prompt_ids: Sequence[int]) -> None:
        if self.told or not self.starts:
            return
        if any(ends_with(self.tokenizer, prompt_ids, start) for start in self.starts):
            return
        self.told = True
        trained = " or ".join(map(repr, self.starts))
        why = "another chat template or thinking mode"
        log.warning("answers begin otherwise than those that the drafter was trained on, after %s: %s", trained, why)
