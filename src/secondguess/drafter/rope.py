"""How fast a drafter's positions rotate: plain RoPE, or one of the two scalings that change nothing but the rates.

``DrafterConfig.rope_scaling`` holds what ``rope_parameters`` of a Hugging Face config does besides the base:

- ``linear``: all rates are divided by ``factor``
- ``llama3`` (Llama 3.1): rates whose wave is longer than ``original_max_position_embeddings / low_freq_factor`` are
  divided by ``factor``, those whose wave is shorter than ``... / high_freq_factor`` stay, those between are blended
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secondguess.config import DrafterConfig
from secondguess.errors import UserError

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rope_rates(c: DrafterConfig) -> Tensor:
    """float64 [D / 2] radians per position, on the CPU: the same bits wherever they are used."""
    rates = c.rope_theta ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float64, device="cpu") / c.head_dim)
    scaling = c.rope_scaling
    if scaling is None:
        return rates
    slow = rates / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    turns = scaling["original_max_position_embeddings"] * rates / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * rates + (1 - keep) * slow


def scaling_of(rope: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """What ``rope_scaling`` is for ``rope_parameters``. Raises UserError for a kind that is not one of these."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    numbers = {name: rope.get(name) for name in SCALINGS.get(str(kind), ())}
    if not numbers or not all(isinstance(n, int | float) and n > 0 for n in numbers.values()):
        known = f"plain RoPE, or {' or '.join(SCALINGS)} with all their numbers"
        raise UserError(f"{where}: rope_parameters {dict(rope)!r} are not supported: {known}")
    return {"rope_type": kind, **numbers}


def rope_parameters(c: DrafterConfig) -> dict[str, Any]:
    """As they are written to ``config.json``."""
    return {**(c.rope_scaling or {"rope_type": "default"}), "rope_theta": c.rope_theta}
