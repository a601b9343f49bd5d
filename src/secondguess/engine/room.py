"""How many requests of how many tokens there is room for."""

from __future__ import annotations

import logging

import torch

from secondguess.engine.pages import lends
from secondguess.engine.slots import SlotCache
from secondguess.errors import require
from secondguess.machine import available_bytes

SHARE = 0.8  # of the memory that is free; the rest is for everything else
DEFAULT_CONTEXT = 8192
log = logging.getLogger(__name__)


def check_batch(wanted: int) -> None:
    """Raises UserError if a batch cannot have so many requests."""
    whole = isinstance(wanted, int) and wanted >= 1
    require(whole, f"max_batch_size must be a whole number, at least 1, got {wanted!r}")


def context_of(limit: int, wanted: int | None, kv_cache_tokens: int | None) -> int:
    """Tokens of a request, by default as many as fit into the target's context of ``limit``, but no more than 8192.

    Raises UserError if they do not fit, or are more than ``kv_cache_tokens``.
    """
    fits = wanted is None or (isinstance(wanted, int) and 1 < wanted <= limit)
    require(fits, f"max_model_len must be a whole number in [2, {limit}] for this target, got {wanted!r}")
    context = wanted or min(limit, DEFAULT_CONTEXT)
    enough = kv_cache_tokens is None or (isinstance(kv_cache_tokens, int) and kv_cache_tokens >= context)
    least = f"at least max_model_len ({context})"
    require(enough, f"kv_cache_tokens must be a whole number, {least}, got {kv_cache_tokens!r}")
    return context


def slots_within(wanted: int, context: int, kv_cache_tokens: int | None, device: torch.device) -> int:
    """Slots of ``context`` tokens for a batch of ``wanted`` requests.

    Where all of their memory is taken at once, as on a GPU, no more than ``kv_cache_tokens`` fill.
    """
    if kv_cache_tokens is None or lends(device) or wanted * context <= kv_cache_tokens:
        return wanted
    fitting = kv_cache_tokens // context
    there = f"{kv_cache_tokens} tokens of K/V cache are room for {fitting} of max_model_len ({context}) tokens"
    log.warning("%s: a batch has so many requests, not %d; a lower max_model_len makes room for more", there, wanted)
    return fitting


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
