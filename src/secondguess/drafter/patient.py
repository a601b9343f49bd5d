"""A drafter beside its target, as far as its checkpoint can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import Tensor

from secondguess.config import DEFAULT_CONTEXT, DrafterConfig
from secondguess.drafter.checkpoint import WEIGHTS, Checkpoint, check_target, read_drafter, tap_for
from secondguess.drafter.model import Drafter
from secondguess.drafter.settings import read_block, read_settings
from secondguess.errors import UserError
from secondguess.target.base import Target
from secondguess.target.facts import TargetFacts, recorded

# What to do about a checkpoint that cannot be read, by how far that went.
FOREIGN = "import it: 'secondguess import' reads drafters of other trainers"
LOST = "take config.json from where the drafter was trained or exported: a tool changed or lost a setting"
STRANGER = "give the target that it was trained for, or train a drafter for this one"
DAMAGED = "get its files from where it was trained or exported: a tensor was changed, cut or lost"

Verdict = Literal["ok", "unknown", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor: what was found, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """What the ``secondguess`` block tells."""

    block: Mapping[str, Any]
    then: TargetFacts  # at training
    now: TargetFacts

    @property
    def training(self) -> Mapping[str, Any]:
        return self.block.get("training", {})


@dataclass(frozen=True, slots=True)
class Configured(Patient):
    """All settings are there, and fit each other."""

    config: DrafterConfig
    context: int  # tokens that a text may have here


@dataclass(frozen=True, slots=True)
class Fitting(Configured):
    """It was made for this target."""


@dataclass(frozen=True, slots=True)
class Loaded(Fitting):
    """All tensors are there."""

    drafter: Drafter
    stored: str  # dtype on disk
    embedding: Tensor  # the target's


def loaded(checkpoint: Checkpoint, facts: TargetFacts, embedding: Tensor, context: int | None = None) -> Loaded:
    """``facts``, ``embedding``: the target's. ``context``: of the service, by default what ``LLM`` gives it."""
    block, drafter = checkpoint.block, checkpoint.drafter
    stored = stored_dtype(checkpoint.folder)
    context = context or default_context(facts)
    return Loaded(block, recorded(block), facts, drafter.config, context, drafter, stored, embedding)


def admit(folder: Path, target: Target, facts: TargetFacts) -> tuple[Patient, Finding]:
    """A checkpoint as far as it can be read, and where that ends. ``target`` taps from now on what the drafter reads.

    ``facts``: of the target, as it is served.
    """
    patient, fix = Patient({}, TargetFacts(), facts), FOREIGN
    try:
        if block := read_block(folder):
            patient, fix = Patient(block, recorded(block), facts), LOST
        config, block = read_settings(folder)
        patient, fix = Configured(block, recorded(block), facts, config, default_context(facts)), STRANGER
        check_target(config, block, target.embedding, target.spec.num_layers, folder)
        patient, fix = Fitting(block, recorded(block), facts, config, default_context(facts)), DAMAGED
        checkpoint = Checkpoint(folder, block, read_drafter(folder, config, block, target.embedding))
    except UserError as error:
        return patient, Finding("checkpoint", "error", str(error), fix)
    tap_for(checkpoint.drafter, target)
    whole = "whole: all settings and tensors are there, of the right shape"
    return loaded(checkpoint, facts, target.embedding), Finding("checkpoint", "ok", whole)


def default_context(facts: TargetFacts) -> int:
    return min(facts.max_positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def stored_dtype(folder: Path) -> str:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return str(file.get_tensor("norm.weight").dtype).removeprefix("torch.")
