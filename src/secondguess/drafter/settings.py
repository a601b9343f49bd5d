"""``config.json`` of a drafter: the flat EAGLE-3 settings, and the ``secondguess`` block that other engines ignore.

Every setting of the network must be there and is checked, since a lost flag is another network that nobody notices. The
block repeats those that differ among EAGLE-3 drafters, so that a tool that rewrites the config is found out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from secondguess.atomic import replacing
from secondguess.config import MAX_LAYERS, DrafterConfig, SecondLook
from secondguess.drafter.rope import rope_parameters, scaling_of
from secondguess.drafter.speculators_form import FLAT_ARCHITECTURES, TAPS, flattened
from secondguess.errors import UserError, did_you_mean
from secondguess.target.base import default_tap_layers

# What the network here always is; a checkpoint that says otherwise was made for another.
FIXED = {
    "architectures": FLAT_ARCHITECTURES,
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# What it may be, and what EAGLE-3.1 is.
FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "norm_before_residual": False}
# Settings that other tools write and that must have these values if they are there.
IF_GIVEN = {
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "sliding_window": None,
    "quantization_config": None,
}
COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "target_hidden_size", "num_hidden_layers",
)  # fmt: skip
MOST = 2**19  # of each: with more, a count of weights may not fit in 63 bits
NUMBERS = ("rms_norm_eps", "rope_theta")
OURS = {
    "target_num_layers": int,
    "target_embedding": str,
    "reconsideration": bool,
    "flags": dict,
    "own_embedding": bool,
    "lens": bool,
}
# Drafters that were written before the block held these are EAGLE-3.1.
BEFORE: dict[str, Any] = {"flags": FLAGS, "own_embedding": False, "tap_layers": None, "lens": False}


def to_json(config: DrafterConfig, fingerprint: str, notes: dict[str, Any]) -> dict[str, Any]:
    """``fingerprint`` of the target's embedding; ``notes`` go into the ``secondguess`` block.

    Layers are named only if they are not EAGLE-3's: engines disagree on what a number means.
    """
    shape, limit = asdict(config), config.max_position_embeddings
    shape["num_hidden_layers"] = shape["num_layers"]
    eagle: dict[str, Any] = {"norm_before_fc": True} if config.norm_before_fc else {}
    if config.tap_layers:
        eagle[TAPS] = list(config.tap_layers)
    return {
        **FIXED,
        **{key: shape[key] for key in (*FLAGS, *COUNTS, *NUMBERS)},
        "rope_parameters": rope_parameters(config),
        **({"max_position_embeddings": limit} if limit else {}),
        **({"eagle_config": {"use_aux_hidden_state": True, **eagle}} if eagle else {}),
        "secondguess": {
            "target_num_layers": config.target_num_layers,
            "target_embedding": fingerprint,
            "reconsideration": config.second_look is not None,
            "second_look": shape["second_look"],
            "lens": config.lens,
            "flags": {key: shape[key] for key in FLAGS},
            "own_embedding": config.own_embedding,
            "tap_layers": shape["tap_layers"],
            "rope": rope_parameters(config),
            **notes,
        },
    }


def read_json(folder: Path) -> dict[str, Any]:
    """``config.json``, as it is. Raises UserError if there is none or it is not JSON."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no drafter at {folder}: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON: the drafter is damaged") from None
    return config if isinstance(config, dict) else {}


def read_block(folder: Path) -> dict[str, Any]:
    """The ``secondguess`` block as it stands there, unchecked; empty if there is none. Raises as ``read_json`` does."""
    block = read_json(folder).get("secondguess")
    return block if isinstance(block, dict) else {}


def add_note(folder: Path, name: str, value: Any) -> None:
    """Set ``name`` of the ``secondguess`` block, in a drafter's folder."""
    config = read_json(folder)
    config["secondguess"][name] = value
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=1) + "\n")


def read_settings(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """The shape and the ``secondguess`` block. Raises UserError unless it is a drafter of this package, in full."""
    path, config = folder / "config.json", flattened(read_json(folder))
    ours = config.get("secondguess")
    if not ours or not isinstance(ours, dict):
        what = f"{folder} is not a secondguess drafter: its config.json has no secondguess block"
        raise UserError(f"{what}; 'secondguess import' reads those of other trainers")
    ours = BEFORE | ours
    check_types(ours, OURS, path)
    check_types(ours["flags"], dict.fromkeys(FLAGS, bool), path)
    check_network(config, ours["flags"], path)
    check_types(config, dict.fromkeys(COUNTS, int) | dict.fromkeys(NUMBERS, float), path)
    if "max_position_embeddings" in config:
        check_types(config, {"max_position_embeddings": int}, path)
    check_consistent(config, ours["own_embedding"], path)
    shape = {key: config[key] for key in (*FLAGS, *COUNTS, *NUMBERS)}
    return DrafterConfig(
        num_layers=shape.pop("num_hidden_layers"),
        **shape,
        **{key: ours[key] for key in ("target_num_layers", "own_embedding", "lens")},
        second_look=read_second_look(ours, path),
        tap_layers=read_taps(config, ours, path),
        rope_scaling=read_scaling(config, ours, path),
        max_position_embeddings=config.get("max_position_embeddings"),
    ), ours


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


def check_network(config: dict[str, Any], flags: dict[str, Any], path: Path) -> None:
    for key, value in (FIXED | flags | {key: v for key, v in IF_GIVEN.items() if key in config}).items():
        if config.get(key) != value or type(config[key]) is not type(value):
            raise UserError(f"{path}: {key} must be {json.dumps(value)} for this drafter, got {config.get(key)!r}")


WORDS = {
    int: "a whole number above 0",
    float: "a number above 0",
    str: "text",
    bool: "true or false",
    dict: "an object",
}


def check_types(values: dict[str, Any], types: dict[str, type], path: Path) -> None:
    """Every key is there, of its type; numbers above 0. A float may be a whole number; a bool is no number."""
    for key, kind in types.items():
        if key not in values:
            raise UserError(f"{path} lacks {key}: the drafter is damaged")
        value = values[key]
        allowed = (int, float) if kind is float else (kind,)
        if type(value) not in allowed or (kind in (int, float) and not value > 0):
            raise UserError(f"{path}: {key} must be {WORDS[kind]}, got {value!r}")


def check_consistent(config: dict[str, Any], own_embedding: bool, path: Path) -> None:
    """Settings that follow from others, and sizes that can be counted with."""
    for key in COUNTS:
        if config[key] > MOST:
            raise UserError(f"{path}: {key} is {config[key]}, above {MOST}: the drafter is damaged")
    if config["num_attention_heads"] % config["num_key_value_heads"] or config["head_dim"] % 2:
        raise UserError(f"{path}: heads must be a multiple of key/value heads, and head_dim even")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise UserError(f"{path}: num_hidden_layers must be at most {MAX_LAYERS}, got {config['num_hidden_layers']}")
    if config["draft_vocab_size"] > config["vocab_size"]:
        raise UserError(f"{path}: draft_vocab_size is larger than vocab_size")
    if config["hidden_size"] != config["target_hidden_size"] and not own_embedding:
        raise UserError(f"{path}: hidden_size is not target_hidden_size, so the drafter needs an embedding of its own")


def read_scaling(config: dict[str, Any], ours: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Of the RoPE, whose base is said twice and must be the same. Newer blocks say again what it is."""
    theta = config["rope_theta"]
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    if not isinstance(rope, dict) or rope.get("rope_theta") != theta:
        raise UserError(f"{path}: rope_parameters {rope!r} do not have the rope_theta {theta}")
    scaling = scaling_of(rope, str(path))
    found = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    if ours.get("rope", found) != found:
        raise UserError(f"{path}: rope_parameters must be {ours['rope']}, as at training, got {rope!r}")
    return scaling


def read_taps(config: dict[str, Any], ours: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    """The layers whose inputs are tapped, None for EAGLE-3's, as the block says. Other engines' lists must agree."""
    taps, num_layers = ours["tap_layers"], ours["target_num_layers"]
    wanted = list(default_tap_layers(num_layers)) if taps is None else taps
    check_taps(wanted, num_layers, path)
    for holder in (config, config.get("eagle_config", {})):
        if (found := holder.get(TAPS) or wanted) != wanted:
            other = f"{TAPS} must be {wanted}, got {found!r}"
            raise UserError(f"{path}: {other}: the drafter was not trained on other taps")
    return None if taps is None else tuple(taps)


def check_taps(layers: Any, num_layers: int, path: Path) -> None:
    whole = isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)
    if not whole or len({*layers}) < len(layers) or not all(0 <= layer < num_layers for layer in layers):
        raise UserError(f"{path}: taps must be different layers of 0 to {num_layers - 1}, got {layers!r}")
