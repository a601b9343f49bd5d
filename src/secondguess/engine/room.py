"""How many tokens' K/V the memory holds, where it is taken as it fills."""

from __future__ import annotations

import logging

from secondguess.engine.slots import SlotCache
from secondguess.errors import require
from secondguess.machine import available_bytes

SHARE = 0.8  # of the memory that is free; the rest is for everything else
log = logging.getLogger(__name__)


def room_in_memory(cache: SlotCache, max_len: int) -> int | None:
    """Tokens that the texts which run may have together; None if memory holds all that the slots do.

    Raises UserError if there is none for one text of ``max_len`` tokens.
    """
    free = available_bytes() if cache.grows else None
    if free is None or cache.bytes <= SHARE * free:
        return None
    num_tokens = int(SHARE * free / cache.bytes * cache.num_slots * cache.num_columns)
    needed = f"K/V of {cache.num_slots} texts take up to {cache.bytes / 1e9:.2g} GB, and {free / 1e9:.2g} GB are free"
    require(num_tokens >= max_len, f"{needed}: no room for one of max_model_len ({max_len}) tokens, lower that")
    log.warning("%s: the texts that run may have %d tokens together, then the newest waits", needed, num_tokens)
    return num_tokens
