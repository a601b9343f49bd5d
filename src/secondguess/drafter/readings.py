"""Other ways to read a drafter of another trainer: the settings that its tensors do not give away, one by one.

A lost flag, another base or layers that were counted otherwise leave a checkpoint that loads and guesses worse. Its
guesses alone can tell, so the doctor counts those of every reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from secondguess.config import DrafterConfig
from secondguess.drafter.checkpoint import tap_for
from secondguess.drafter.fit import rope_theta
from secondguess.drafter.model import Drafter
from secondguess.target.base import default_tap_layers
from secondguess.target.hf import HFTarget

USUAL_BASE = 10000.0  # what trainers take that do not read the target's


def readings(drafter: Drafter, target: HFTarget) -> Iterator[tuple[str, Drafter]]:
    """What ``import --set`` would have to be told, and the drafter that it would give. Weights are shared.

    ``target`` taps from now on what these drafters read.
    """
    for said, change in changes(drafter.config, rope_theta(target.model.config.rope_parameters)).items():
        shape = replace(drafter.config, **change)
        other = Drafter(shape, drafter.embedding if shape.own_embedding else target.embedding, drafter.target_ids)
        other.load_state_dict(drafter.state_dict(), assign=True)
        tap_for(other, target)
        yield said, other.eval()


def changes(c: DrafterConfig, target_base: float) -> dict[str, dict[str, Any]]:
    """Fields that another reading changes, by the words for it. ``target_base``: of the target's RoPE."""
    found: dict[str, dict[str, Any]] = {
        f"{flag}={str(not value).lower()}": {flag: not value}
        for flag, value in (("norm_output", c.norm_output), ("norm_before_residual", c.norm_before_residual))
    }
    for base in sorted({USUAL_BASE, target_base} - {c.rope_theta}):
        found[f"rope_theta={base:g}"] = {"rope_theta": base}
    layers = c.tap_layers or default_tap_layers(c.target_num_layers)
    for moved in (tuple(layer + step for layer in layers) for step in (-1, 1)):
        if min(moved) >= 0 and max(moved) < c.target_num_layers:
            usual = moved == default_tap_layers(c.target_num_layers)
            found[f"layer_ids={','.join(map(str, moved))}"] = {"tap_layers": None if usual else moved}
    if c.own_embedding and c.hidden_size == c.target_hidden_size:
        found["own_embedding=false"] = {"own_embedding": False}
    return found
