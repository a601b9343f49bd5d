"""The training configuration: one field, one line, one meaning. YAML keys and dotted overrides use the same names."""

from __future__ import annotations

import contextlib
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from secondguess.config import LIMITS, option
from secondguess.errors import UserError, did_you_mean
from secondguess.fields import check_choices, choices


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a drafter is trained. Raises UserError when a value is out of range."""

    responses: str = field(metadata={"help": "JSONL file of the target's own answers: id, prompt_len, input_ids"})
    out: str = field(metadata={"help": "run folder: checkpoint, log, resume state"})
    target: str = option("smollm2-135m", "folder, hub id, .gguf file, or the alias smollm2-135m")
    method: Literal["eagle3.1", "pr"] = option("pr", "drafter to train")
    captures: str = option("captures", "folder of captured target states; none: the target runs beside the training")
    draft_vocab_size: int = option(4096, "tokens that the drafter can offer")
    unroll_steps: int = option(5, "steps of training-time test (T)")
    step_decay: float = option(0.8, "unroll step j weighs step_decay ** j")
    epochs: int = option(6, "times that each response is seen")
    batch_size: int = option(8, "responses per step")
    lr: float = option(1e-3, "highest learning rate; cosine to zero")
    warmup: float = option(0.05, "share of the steps that the learning rate takes to its highest")
    weight_decay: float = option(0.0, "AdamW's, of matrices only")
    clip: float = option(1.0, "highest gradient norm")
    held_out: float = option(0.06, "share of the responses kept for evaluation, chosen by a hash of the id")
    seed: int = option(0, "of start weights, order and carried rows")
    precision: Literal["auto", "float32", "bfloat16"] = option("auto", "of matrix products; weights stay float32")
    level1_weight: float = option(1.0, "weight of level 1's loss (lambda)")
    rho: float = option(1.0, "share of rows, most doubtful first, that get a second look")
    attach: float = option(1.0, "how much of level 1's gradient reaches level 0")
    carry: Literal["half", "off", "all"] = option("half", "rows whose next step starts from level 1")
    balance: Literal["floor", "hinge"] = option("floor", "form of the balance term")
    balance_weight: float = option(0.0, "weight of the balance term (beta)")
    eval_every: int = option(200, "steps between evaluations")
    save_every: int = option(100, "steps between resume points")
    accumulate: int = option(1, "batches per step: their gradients add up before the weights move")
    warm_start: str = option("none", "drafter to start from and to keep the vocabulary of: a folder, or one that ships")
    eval_budget: int = option(24, "draft tokens per cycle, for the held-out acceptance length (tau)")
    eval_responses: int = option(16, "held-out responses that it is measured on; 0: it is not")
    track: Literal["none", "tensorboard", "wandb", "trackio"] = option("none", "where the log goes besides log.jsonl")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes a GPU if there is one")
    parallel: Literal["replicate", "shard"] = option(
        "replicate", "under torchrun, what each process keeps: the whole drafter, or a part of it"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("draft_vocab_size", "unroll_steps", "epochs", "batch_size", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rho", "attach", "held_out", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("lr", "step_decay", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("weight_decay", "level1_weight", "balance_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed must be in [0, 2^31), got {self.seed}")
        if self.rho == 0 and self.method == "pr":
            raise UserError("rho must be above 0 for pr: no row would get a second look")
        ranges = (("accumulate", 1, 2**20), ("eval_budget", *LIMITS["budget"]), ("eval_responses", 0, 4096))
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} must be in [{low}, {high}], got {getattr(self, name)}")


def list_settings() -> str:
    """One line per key: name, meaning, choices, default."""
    lines, allowed = ["settings (in the file, or as key=value):"], choices(TrainConfig)
    for f in fields(TrainConfig):
        words = f" ({', '.join(allowed[f.name])})" if f.name in allowed else ""
        default = "required" if f.default is MISSING else f"default: {f.default}"
        lines.append(f"  {f.name:<17} {f.metadata['help']}{words}; {default}")
    return "\n".join(lines)


def load_config(path: Path | None, overrides: list[str]) -> TrainConfig:
    """Read YAML, apply ``key=value`` overrides (values are YAML too). Unknown keys and wrong types are errors."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold key: value lines")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"override {override!r} is not of the form key=value")
        values[key] = parse_yaml(text, f"override {override!r}")
    for key in ("responses", "out"):
        if key not in values:
            raise UserError(f"{key} is not set: give it in the YAML file or as {key}=...")
    return TrainConfig(**{key: checked(key, value) for key, value in values.items()})


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:  # tags gone wrong
        raise UserError(f"{where} is not YAML: {str(error).splitlines()[0]}") from None


def checked(key: Any, value: Any) -> Any:
    """The value in its field's type."""
    hints = get_type_hints(TrainConfig)
    if key not in hints:
        raise UserError(f"unknown setting {key!r}{did_you_mean(str(key), hints)}")
    if hints[key] is float:
        # YAML 1.1 reads 1e-3 as a string.
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                return float(value)
        raise UserError(f"{key} must be a number, got {value!r}")
    expected = int if hints[key] is int else str
    if not isinstance(value, expected) or isinstance(value, bool):
        raise UserError(f"{key} must be {'a whole number' if expected is int else 'text'}, got {value!r}")
    return value


def dump_config(config: TrainConfig) -> str:
    return yaml.safe_dump(asdict(config), sort_keys=False)
