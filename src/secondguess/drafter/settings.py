"""``config.json`` of a drafter: the flat EAGLE-3 settings, and the ``secondguess`` block that other engines ignore."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from secondguess.config import MAX_LAYERS, DrafterConfig, SecondLook
from secondguess.errors import UserError, did_you_mean
from secondguess.target.base import default_tap_layers

# What the one network here is; a checkpoint that says otherwise was made for another.
FIXED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_fc": False,
    "norm_before_residual": False,
}
# Settings that other tools write and that must have these values if they are there.
IF_GIVEN = {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}
COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "target_hidden_size", "num_hidden_layers",
)  # fmt: skip
NUMBERS = ("rms_norm_eps", "rope_theta")
TAPS = "eagle_aux_hidden_state_layer_ids"


def to_json(config: DrafterConfig, fingerprint: str, notes: dict[str, Any]) -> dict[str, Any]:
    """``fingerprint`` of the target's embedding; ``notes`` go into the ``secondguess`` block."""
    shape = asdict(config)
    shape["num_hidden_layers"] = shape["num_layers"]
    return {
        **FIXED,
        **{key: shape[key] for key in (*COUNTS, *NUMBERS)},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "secondguess": {
            "target_num_layers": config.target_num_layers,
            "target_embedding": fingerprint,
            "reconsideration": config.second_look is not None,
            "second_look": shape["second_look"],
            **notes,
        },
    }


def read_settings(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """The shape and the ``secondguess`` block. Raises UserError unless it is the network of this package, in full."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no drafter at {folder}: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON: the drafter is damaged") from None
    ours = config.get("secondguess") if isinstance(config, dict) else None
    if not ours or not isinstance(ours, dict):
        raise UserError(f"{folder} is not a secondguess drafter: its config.json has no secondguess block")
    check_network(config, path)
    check_types(ours, {"target_num_layers": int, "target_embedding": str, "reconsideration": bool}, path)
    check_types(config, dict.fromkeys(COUNTS, int) | dict.fromkeys(NUMBERS, float), path)
    check_consistent(config, ours["target_num_layers"], path)
    shape = {key: config[key] for key in (*COUNTS, *NUMBERS)}
    shape |= {"num_layers": shape.pop("num_hidden_layers"), "target_num_layers": ours["target_num_layers"]}
    return DrafterConfig(**shape, second_look=read_second_look(ours, path)), ours


def read_second_look(ours: dict[str, Any], path: Path) -> SecondLook | None:
    """How level 1 was trained; checkpoints that do not say were trained the default way."""
    if not ours["reconsideration"]:
        return None
    look, known = ours.get("second_look", {}), [f.name for f in fields(SecondLook)]
    if not isinstance(look, dict):
        raise UserError(f"{path}: second_look must hold {', '.join(known)}, got {look!r}")
    for key in look.keys() - set(known):
        raise UserError(f"{path}: second_look has an unknown setting {key!r}{did_you_mean(key, known)}")
    try:
        return SecondLook(**look)
    except UserError as error:
        raise UserError(f"{path}: second_look: {error}") from None


def check_network(config: dict[str, Any], path: Path) -> None:
    for key, value in (FIXED | {key: v for key, v in IF_GIVEN.items() if key in config}).items():
        if config.get(key) != value or type(config[key]) is not type(value):
            raise UserError(f"{path}: {key} must be {json.dumps(value)} for EAGLE-3.1, got {config.get(key)!r}")


def check_types(values: dict[str, Any], types: dict[str, type], path: Path) -> None:
    """Every key is there, of its type; numbers above 0. A float may be a whole number; a bool is no number."""
    for key, kind in types.items():
        if key not in values:
            raise UserError(f"{path} lacks {key}: the drafter is damaged")
        value = values[key]
        allowed = (int, float) if kind is float else (kind,)
        if type(value) not in allowed or (kind in (int, float) and not value > 0):
            wanted = {int: "a whole number above 0", float: "a number above 0", str: "text", bool: "true or false"}[
                kind
            ]
            raise UserError(f"{path}: {key} must be {wanted}, got {value!r}")


def check_consistent(config: dict[str, Any], target_num_layers: int, path: Path) -> None:
    """Settings that are said twice, or that follow from others."""
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": config["rope_theta"]})
    if rope != {"rope_type": "default", "rope_theta": config["rope_theta"]}:
        raise UserError(f"{path}: rope_parameters {rope!r} are not plain RoPE of rope_theta {config['rope_theta']}")
    nested = config.get("eagle_config")
    for holder in (config, nested if isinstance(nested, dict) else {}):
        default = list(default_tap_layers(target_num_layers))
        if holder.get(TAPS, default) != default:
            raise UserError(f"{path}: {TAPS} must be {default}, got {holder[TAPS]!r}: other taps are not supported")
    if config["num_attention_heads"] % config["num_key_value_heads"] or config["head_dim"] % 2:
        raise UserError(f"{path}: heads must be a multiple of key/value heads, and head_dim even")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise UserError(f"{path}: num_hidden_layers must be at most {MAX_LAYERS}, got {config['num_hidden_layers']}")
    if config["draft_vocab_size"] > config["vocab_size"]:
        raise UserError(f"{path}: draft_vocab_size is larger than vocab_size")
