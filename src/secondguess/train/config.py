"""The training configuration: one field, one line, one meaning. YAML keys and dotted overrides use the same names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml

from secondguess.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a drafter is trained. Raises UserError when a value is out of range."""

    responses: str  # JSONL of the target's own answers
    out: str  # run folder: checkpoint, log, resume state
    target: str = "smollm2-135m"
    method: Literal["eagle3.1", "pr"] = "pr"
    captures: str = "captures"  # folder of captured target states
    draft_vocab_size: int = 4096
    unroll_steps: int = 5  # T of training-time test
    step_decay: float = 0.8  # weight of unroll step j is step_decay ** j
    epochs: int = 6
    batch_size: int = 8  # responses per step
    lr: float = 1e-3
    warmup: float = 0.05  # share of all steps
    weight_decay: float = 0.0
    clip: float = 1.0  # gradient norm
    held_out: float = 0.06  # share of responses, chosen by a hash of the id
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; weights stay float32
    level1_weight: float = 1.0  # lambda
    rho: float = 1.0  # share of rows, most doubtful first, that get a second look
    attach: float = 1.0  # how much of level 1's gradient reaches level 0
    carry: Literal["half", "off", "all"] = "half"  # rows whose next step starts from level 1
    balance: Literal["floor", "hinge"] = "floor"
    balance_weight: float = 0.0  # beta
    eval_every: int = 200  # steps
    save_every: int = 100  # steps between resume points

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), LITERALS.get(field.name)
            if allowed and value not in allowed:
                raise UserError(f"{field.name} must be one of {', '.join(allowed)}, got {value!r}")
        for name in ("draft_vocab_size", "unroll_steps", "epochs", "batch_size", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rho", "attach", "held_out", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.rho == 0 and self.method == "pr":
            raise UserError("rho must be above 0 for pr: no row would get a second look")


LITERALS: dict[str, tuple[str, ...]] = {
    "method": ("eagle3.1", "pr"),
    "precision": ("auto", "float32", "bfloat16"),
    "carry": ("half", "off", "all"),
    "balance": ("floor", "hinge"),
}


def load_config(path: Path | None, overrides: list[str]) -> TrainConfig:
    """Read YAML, apply ``key=value`` overrides (values are YAML too). Unknown keys and wrong types are errors."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold key: value lines")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"override {override!r} is not of the form key=value")
        values[key] = yaml.safe_load(text)
    return TrainConfig(**{key: checked(key, value) for key, value in required(values).items()})


def required(values: dict[str, Any]) -> dict[str, Any]:
    for key in ("responses", "out"):
        if key not in values:
            raise UserError(f"{key} is not set: give it in the YAML file or as {key}=...")
    return values


def checked(key: str, value: Any) -> Any:
    """The value in its field's type."""
    kinds = {field.name: str(field.type) for field in fields(TrainConfig)}
    if key not in kinds:
        near = get_close_matches(key, kinds, n=1)
        raise UserError(f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    kind = kinds[key]
    if kind == "float":
        # YAML 1.1 reads 1e-3 as a string.
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(f"{key} must be a number, got {value!r}") from None
    expected = int if kind == "int" else str
    if not isinstance(value, expected) or isinstance(value, bool):
        raise UserError(f"{key} must be {'a whole number' if expected is int else 'text'}, got {value!r}")
    return value


def dump_config(config: TrainConfig) -> str:
    return yaml.safe_dump(asdict(config), sort_keys=False)
