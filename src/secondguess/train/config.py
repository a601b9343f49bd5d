"""The training configuration: one field, one line, one meaning. YAML keys and ``key=value`` overrides share names."""

from __future__ import annotations

import contextlib
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from secondguess.config import LIMITS, MAX_LAYERS, SecondLook, option
from secondguess.errors import UserError, did_you_mean, require
from secondguess.fields import check_choices, choices
from secondguess.train.recipe import RECIPES, Recipe

# Settings that some methods have no use for.
LOOK = tuple(f.name for f in fields(SecondLook))
LEVEL1 = ("level1_weight", "rho", "attach", "carry", "balance", "balance_weight", "lens", "shared_loss", *LOOK)
DRAFT_VOCABULARY = 8192
TOP_K = ("top_k", "top_k_weight")
# Defaults before these: files that a run has written in full name them also where they change nothing.
FORMER: dict[str, Any] = {"carry": "half", "lens": False, "shared_loss": "both"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a drafter is trained. Raises UserError when a value is out of range."""

    responses: str = field(metadata={"help": "JSONL file of the target's own answers: id, prompt_len, input_ids"})
    out: str = field(metadata={"help": "run folder: checkpoint, log, resume state"})
    target: str = option("smollm2-135m", "folder, hub id, .gguf file, or the alias smollm2-135m")
    trust_remote_code: bool = option(False, "run Python code that comes with the target; without it none is run")
    method: Literal["eagle3.1", "pr", "hass", "hass+pr"] = option("pr", "drafter to train")
    captures: str = option("captures", "folder of captured target states; none: the target runs beside the training")
    draft_vocab_size: int = option(0, f"tokens that the drafter can offer; 0: {DRAFT_VOCABULARY}, or a warm start's")
    num_layers: int = option(1, "layers of the drafter's block; EAGLE-3.1 has one")
    unroll_steps: int = option(3, "steps of training-time test (T)")
    step_decay: float = option(0.8, "unroll step j weighs step_decay ** j")
    loss: Literal["soft_ce", "kl", "tv", "lk"] = option(
        "soft_ce", "between the target's distribution and the drafter's: cross-entropy, KL, total variation, LK"
    )
    top_k: int = option(10, "hass: tokens in its loss on the target's most probable ones")
    top_k_weight: float = option(1.0, "hass: weight of that loss")
    epochs: int = option(3, "passes over the responses; of each, those that fill no whole step at its end are left out")
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
    carry: Literal["half", "merge", "off", "all"] = option(
        "off",
        "rows whose next step starts from level 1: a random half of the more doubtful half; where level 1 finds the "
        "next token more probable, as serving merges; none; all",
    )
    balance: Literal["floor", "hinge", "anchor"] = option("floor", "form of the balance term")
    balance_weight: float = option(0.0, "weight of the balance term (beta)")
    anchor_to: str = option("none", "anchor: drafter to hold level 0 to, as warm_start; none: its own moving average")
    anchor_decay: float = option(0.999, "anchor: of the moving average, per step")
    see_own_level0: bool = option(True, "a second look attends to its node's first")
    query_slot: Literal["self_query", "own_token", "soft_pred"] = option(
        "self_query", "stands where level 0 has the token's embedding"
    )
    query_rope: Literal["same", "next"] = option("same", "position of a second look: its node's own, or one further")
    lens: bool = option(True, "a second look reads its node's feature through a matrix of its own (not in the paper)")
    shared_loss: Literal["auto", "both", "level0", "none"] = option(
        "auto",
        "whose loss moves the weights that both levels use; level0: they become those of eagle3.1, bit for bit; none: "
        "they stay as warm_start has them (neither is in the paper); auto: level0, but both where carry, attach, "
        "balance_weight or parallel=shard ask for level 1's say, or level 1 has no weights of its own",
    )
    eval_every: int = option(200, "steps between evaluations")
    save_every: int = option(100, "steps between resume points")
    accumulate: int = option(1, "batches per step: their gradients add up before the weights move")
    warm_start: str = option("none", "drafter to start from: a folder, or one that ships")
    eval_budget: int = option(24, "draft tokens per cycle, for the held-out acceptance length (tau)")
    eval_responses: int = option(16, "held-out responses that it is measured on; 0: it is not")
    track: Literal["none", "tensorboard", "wandb", "trackio"] = option("none", "where the log goes besides log.jsonl")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes a GPU if there is one")
    parallel: Literal["replicate", "shard"] = option(
        "replicate", "under torchrun, what each process keeps: the whole drafter, or a part of it"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in (
            "num_layers", "unroll_steps", "top_k", "epochs", "batch_size", "eval_every",
            "save_every",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rho", "attach", "held_out", "warmup", "anchor_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        require(self.held_out < 1, "held_out=1 leaves no response to train on: choose less")
        for name in ("lr", "step_decay", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("weight_decay", "top_k_weight", "level1_weight", "balance_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed must be in [0, 2^31), got {self.seed}")
        require(self.num_layers <= MAX_LAYERS, f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        ranges = (
            ("accumulate", 1, 2**20),
            ("draft_vocab_size", 0, 2**19),
            ("eval_budget", *LIMITS["budget"]),
            ("eval_responses", 0, 4096),
        )
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} must be in [{low}, {high}], got {getattr(self, name)}")
        self._check_method()
        self._check_balance()
        self._check_shared()

    def _check_method(self) -> None:
        """Settings that fit the method and each other."""
        if self.recipe.level1:
            require(self.rho > 0, f"rho must be above 0 for {self.method}: no row would get a second look")
        else:
            self._refuse(LEVEL1, f"{self.method} has no level 1")
        if self.recipe.top_k_loss:
            size = self.draft_vocab_size or DRAFT_VOCABULARY
            require(self.top_k <= size, f"top_k must be at most draft_vocab_size ({size}), got {self.top_k}")
        else:
            self._refuse(TOP_K, f"{self.method} has no loss on the most probable tokens")

    def _check_balance(self) -> None:
        if self.balance != "anchor":
            self._refuse(("anchor_to", "anchor_decay"), f"balance is {self.balance}, not anchor")
        elif self.anchor_to != "none":
            self._refuse(("anchor_decay",), "anchor_to names a drafter that stays as it is")
        both = "balance=anchor keeps whole weights on every process: take parallel=replicate"
        require(self.balance != "anchor" or self.parallel != "shard", both)
        if self.balance_weight == 0:
            self._refuse(("balance",), "balance_weight is 0")

    def _check_shared(self) -> None:
        if self.taught_by == "both":
            return
        what = f"shared_loss={self.shared_loss}"
        self._refuse(("attach",), f"{what} keeps level 1's gradient from level 0")
        self._refuse(("balance", "balance_weight"), f"{what} leaves the balance to nobody")
        require(self.parallel == "replicate", f"{what} keeps whole weights on every process: take parallel=replicate")
        of_level1 = f"{what} leaves nothing to train of level 1: take lens=true or query_slot=self_query"
        require(self.has_own_weights, of_level1)
        if self.taught_by == "level0":
            require(self.carry == "off", f"{what} needs carry=off: a carried feature would teach level 0")
            return
        require(self.warm_start != "none", f"{what} needs warm_start: a drafter whose weights stay")
        idle = self.level1_weight == 0 and self.carry == "off"
        require(not idle, f"{what} trains nothing with level1_weight=0 and carry=off")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raises UserError if one of the settings is not at its default, since none has an effect."""
        idle = {f.name: (f.default, FORMER.get(f.name, f.default)) for f in fields(self) if f.name in names}
        changed = [name for name, values in idle.items() if getattr(self, name) not in values]
        require(not changed, f"{', '.join(changed)} would change nothing: {why}")

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.method]

    @property
    def network(self) -> dict[str, Any]:
        """What the method asks of the drafter, as ``DrafterConfig`` names it."""
        lens = self.lens and self.recipe.level1
        return {"num_layers": self.num_layers, "second_look": self.second_look, "lens": lens}

    @property
    def has_own_weights(self) -> bool:
        """Whether level 1 has some."""
        return self.lens or self.query_slot == "self_query"

    @property
    def taught_by(self) -> Literal["both", "level0", "none"]:
        """``shared_loss``, and what ``auto`` comes to. Without level 1 there is but one loss: then both."""
        if not self.recipe.level1:
            return "both"
        if self.shared_loss != "auto":
            return self.shared_loss
        return "both" if self.reasons_for_both else "level0"

    @property
    def reasons_for_both(self) -> list[str]:
        """What makes ``shared_loss=auto`` come to ``both``, in words."""
        asks = {
            "carry": self.carry != "off",
            "attach": self.attach != 1,
            "balance_weight": self.balance_weight > 0,
            "parallel": self.parallel == "shard",
        }
        without = [] if self.has_own_weights else ["level 1 without weights of its own"]
        return [f"{name}={getattr(self, name)}" for name, asked in asks.items() if asked] + without

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that the method has a use for, with what ``auto`` comes to."""
        found = asdict(self) | {"shared_loss": self.taught_by}
        return {name: value for name, value in found.items() if name not in idle(self.method)}

    @property
    def second_look(self) -> SecondLook | None:
        """How level 1 looks; None where there is none."""
        return SecondLook(**{name: getattr(self, name) for name in LOOK}) if self.recipe.level1 else None


def idle(method: str) -> tuple[str, ...]:
    """Settings that the method has no use for."""
    recipe = RECIPES[method]
    return (() if recipe.level1 else LEVEL1) + (() if recipe.top_k_loss else TOP_K)


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
    if hints[key] is bool:
        require(isinstance(value, bool), f"{key} must be true or false, got {value!r}")
        return value
    if hints[key] is float:
        # YAML 1.1 reads 1e-3 as a string.
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                return float(value)
        raise UserError(f"{key} must be a number, got {value!r}")
    if value is False and "off" in choices(TrainConfig).get(key, ()):
        return "off"  # YAML 1.1 again
    expected = int if hints[key] is int else str
    if not isinstance(value, expected) or isinstance(value, bool):
        raise UserError(f"{key} must be {'a whole number' if expected is int else 'text'}, got {value!r}")
    return value


def dump_config(config: TrainConfig) -> str:
    return yaml.safe_dump(asdict(config), sort_keys=False)
