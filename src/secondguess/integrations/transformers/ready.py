"""Engines for models that belong to the caller, kept from one call of ``model.generate`` to the next."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from secondguess.engine.thread import run
from secondguess.llm import LLM
from secondguess.target.fingerprint import glance
from secondguess.target.hf import HFTarget

Weights = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine that a model was last decoded with."""

    weights: Weights
    made_of: tuple[str | Path | None, str]  # drafter, method
    llm: LLM


_READY: WeakKeyDictionary[nn.Module, Ready] = WeakKeyDictionary()


def llm_for(model: nn.Module, drafter: str | Path | None, method: str, num_requests: int, length: int) -> LLM:
    """An LLM over the weights of ``model`` with room for ``num_requests`` of ``length`` tokens, and for some more.

    A conversation grows with every turn: room is made by powers of two, so that few of them take a new engine.
    """
    weights, made_of, before = state_of(model), (drafter, method), _READY.get(model)
    if before is None or before.weights != weights:
        target, fits = run(HFTarget, sharing(model)), False
    else:
        target, llm = before.llm.target, before.llm
        roomy = llm.engine.cache.num_slots >= num_requests and llm.max_model_len >= length
        fits = roomy and before.made_of == made_of
    if not fits:
        room = max(length, min(power_of_two(length), target.spec.context_len))
        llm = LLM(target, drafter, method=method, max_batch_size=power_of_two(num_requests), max_model_len=room)
        _READY[model] = Ready(weights, made_of, llm)
    return _READY[model].llm


def power_of_two(number: int) -> int:
    """The least that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def state_of(model: nn.Module) -> Weights:
    """Changes when a weight is replaced or written to. Writes to ``.data`` count no version, so values are looked at,
    which takes about as long as a few tokens.
    """
    return tuple((p.data_ptr(), p._version, glance(p)) for p in model.parameters())


def sharing(model: nn.Module) -> Any:
    """A copy of the modules over the same weights: what the target does to them leaves ``model`` as it is."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, shared)
