"""EAGLE-3 drafters of other trainers: the flat form (SafeAILab, SpecForge, SGLang) and that of ``speculators``.

What a config leaves out is read as the engines that serve it read it. Where that is known to go wrong without a word
(two meanings of layer numbers, lost flags, maps and bases), the user is asked; what is ``given`` by hand comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from secondguess.config import DrafterConfig
from secondguess.drafter.checkpoint import filled
from secondguess.drafter.foreign_tensors import Source, check_marks, read_tensors, take_embedding, take_target_ids
from secondguess.drafter.model import Drafter
from secondguess.drafter.rope import scaling_of
from secondguess.drafter.settings import COUNTS, FLAGS, NUMBERS, check_consistent, check_taps, check_types, read_json
from secondguess.drafter.shipped import download
from secondguess.drafter.speculators_form import KIND, NESTED, OUTSIDE, TAPS, flattened
from secondguess.errors import UserError, did_you_mean
from secondguess.fields import read_value
from secondguess.target.base import default_tap_layers
from secondguess.target.fingerprint import embedding_fingerprint

GIVEN = {**dict.fromkeys(FLAGS, bool), "own_embedding": bool, "rope_theta": float, "layer_ids": str}
# What must be so if it is said at all.
NEEDED = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "use_aux_hidden_state": True,
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
# Settings beside those of a Llama config that are read, or that say nothing of the network.
OTHERS = (
    "eagle_config", "use_aux_norm", "num_aux_hidden_states", "rope_theta", "rope_scaling", "torch_dtype", "dtype",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "_name_or_path", "auto_map",
)  # fmt: skip
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class Imported:
    """A drafter as this package has it, and the dtype it was stored in."""

    drafter: Drafter
    dtype: torch.dtype


def parse_given(texts: Sequence[str]) -> dict[str, Any]:
    """``key=value`` by hand. Raises UserError for an unknown key or a value of another type."""
    given = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in GIVEN:
            raise UserError(f"unknown setting {key!r}{did_you_mean(key, GIVEN)}; settings are {', '.join(GIVEN)}")
        given[key] = read_value(key, GIVEN[key], value)
    if given.get("layer_ids", "inputs") not in ("inputs", "outputs"):
        given["layer_ids"] = parse_layers(given["layer_ids"])
    return given


def parse_layers(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"layer_ids must be inputs or outputs, or the layers themselves (2,16,29), got {text!r}")
    return [int(number) for number in numbers]


def find_source(name: str) -> Path:
    """The local folder of a drafter, downloaded if need be. Raises UserError if there is none."""
    if (path := Path(name).expanduser()).is_dir():
        return path
    try:
        return download(name)
    except UserError as error:
        raise UserError(f"no such drafter: {name!r} is no folder, and {error}") from error


def read_foreign(source: Source) -> Imported:
    """The drafter of a folder. Raises UserError if it cannot be one for the target, or it is not clear how."""
    folder, target, raw = source.folder, source.target, read_json(source.folder)
    if "secondguess" in raw:
        raise UserError(f"{folder} is a secondguess drafter: it needs no import")
    if raw.get(KIND, "eagle3") != "eagle3":
        raise UserError(f"{folder} holds a drafter of kind {raw[KIND]!r}: only eagle3 can be imported")
    tensors = read_tensors(folder)
    source.remarks.extend(remarks_on(raw))
    config = read_config(source, flattened(raw))
    flags = read_flags(source, config, KIND in raw)
    check_marks(tensors, flags, folder)
    layers = read_layers(source, config, KIND in raw, tensors["fc.weight"].shape[1])
    target_ids = take_target_ids(source, tensors, config)
    table = take_embedding(source, tensors, config)
    check_consistent(config, table is not None, source.config)
    counts: dict[str, Any] = flags | {key: config[key] for key in (*COUNTS, *NUMBERS)}
    shape = DrafterConfig(
        num_layers=counts.pop("num_hidden_layers"),
        **counts,
        target_num_layers=config["target_num_layers"],
        own_embedding=table is not None,
        tap_layers=layers,
        rope_scaling=read_scaling(source, config),
        max_position_embeddings=config.get("max_position_embeddings"),
    )
    table = target.embedding.detach().float().cpu() if table is None else table
    drafter = filled(shape, table, target_ids, tensors, folder)
    drafter.target_embedding = embedding_fingerprint(target.embedding)
    return Imported(drafter, tensors["fc.weight"].dtype)


def read_config(source: Source, found: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config with nothing left out, checked against the target. Defaults are Llama's."""
    config, spec, where = dict(found), source.target.spec, source.config
    said = config | config.get("eagle_config", {})
    for key, value in NEEDED.items():
        if said.get(key, value) != value:
            raise UserError(f"{where}: {key} is {said[key]!r}, but only {value!r} is supported")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise UserError(f"{where}: a sliding window of {config['sliding_window']} is not supported")
    check_types(config, dict.fromkeys(REQUIRED, int), where)
    config = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "draft_vocab_size": config["vocab_size"],
        "num_hidden_layers": 1,
        "target_hidden_size": spec.hidden_size,
        "rms_norm_eps": 1e-6,
        **config,
        "rope_theta": read_base(source, config),
        "target_num_layers": spec.num_layers,
    }
    check_types(config, dict.fromkeys(COUNTS, int) | dict.fromkeys(NUMBERS, float), where)
    for key, here in (("vocab_size", spec.vocab_size), ("target_hidden_size", spec.hidden_size)):
        if config[key] != here:
            raise UserError(f"{where}: {key} is {config[key]}, the target's is {here}: it was made for another target")
    if config.get("tie_word_embeddings"):
        source.remarks.append("tie_word_embeddings is true: not so, the drafter has a head of its own")
    return config


def remarks_on(raw: Mapping[str, Any]) -> list[str]:
    """A line on settings that are on and that nobody here knows: the network may be another one."""
    holders = [raw, *(raw[name] for name in ("transformer_layer_config", "eagle_config") if name in raw)]
    said = {key: value for holder in holders if isinstance(holder, dict) for key, value in holder.items()}
    strange = sorted(key for key, value in said.items() if value not in (None, False) and key not in known_settings())
    return [f"settings that are not known here are left out: {', '.join(strange)}"] if strange else []


def known_settings() -> set[str]:
    """Those of a Llama config are read, refused if they matter, or say nothing of a drafter."""
    return {*LlamaConfig().to_dict(), *OUTSIDE, *NESTED, *NEEDED, *FLAGS, *OTHERS}


def ropes_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What transformers 5 writes, then what it wrote before; some tools write both."""
    found = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    return [rope for rope in found if rope and isinstance(rope, dict)]


def read_base(source: Source, config: Mapping[str, Any]) -> float:
    """``rope_theta``, which stands in one of several places, or, for some, in two with different values."""
    if "rope_theta" in source.given:
        return source.given["rope_theta"]
    holders = (config, *ropes_of(config))
    bases = [holder["rope_theta"] for holder in holders if holder.get("rope_theta") is not None]
    if not bases:
        source.remarks.append("rope_theta is not said: 10000, as other engines take it")
        return 10000.0
    for other in bases:
        if other != bases[0]:
            raise UserError(f"{source.config}: rope_theta is both {bases[0]} and {other}: give --set rope_theta=...")
    return bases[0]


def read_scaling(source: Source, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """``rope_scaling``, which stands in one of two places; one that is in the other alone would be lost."""
    ropes = ropes_of(config)
    found = [scaling_of(rope, str(source.config)) for rope in ropes]
    if found and found[0] != found[-1]:
        both = f"rope_parameters {ropes[0]!r} and rope_scaling {ropes[-1]!r} differ"
        raise UserError(f"{source.config}: {both}: leave the one that it was trained with in the file")
    return found[0] if found else None


def read_flags(source: Source, config: Mapping[str, Any], nested: bool) -> dict[str, bool]:
    """Where norms stand. Without a word they are off, except that ``speculators`` and vLLM differ on one of them."""
    found: dict[str, Any] = {"fc_norm": True} if config.get("use_aux_norm") else {}  # SGLang's older word
    for holder in (config.get("eagle_config", {}), config, source.given):
        found |= {key: holder[key] for key in FLAGS if key in holder}
    if nested and "norm_before_residual" not in found:
        unclear = "norm_before_residual is not said, and vLLM then takes true, others false"
        raise UserError(f"{source.config}: {unclear}: give --set norm_before_residual=...")
    flags = dict.fromkeys(FLAGS, False) | found
    check_types(flags, dict.fromkeys(FLAGS, bool), source.config)
    return flags


def read_layers(source: Source, config: Mapping[str, Any], nested: bool, width: int) -> tuple[int, ...] | None:
    """The layers whose inputs the drafter reads; None for EAGLE-3's. ``width``: of all their states together."""
    num_layers, one = config["target_num_layers"], config["target_hidden_size"]
    default = layers = default_tap_layers(num_layers)
    ids = config.get(TAPS) or config.get("eagle_config", {}).get(TAPS)
    if isinstance(given := source.given.get("layer_ids"), list):
        layers = tuple(given)
    elif ids is not None:
        check_taps(ids, num_layers + 1, source.config)
        if len(ids) * one == width + one and ids[-1] == num_layers:
            ids = ids[:-1]  # some trainers list the last state, too, which is what they learn to predict
        layers = inputs_of(source, ids, default, nested)
    check_taps(list(layers), num_layers, source.config)
    if len(layers) * one != width:
        raise UserError(f"{source.config}: the drafter reads {width // one} states, but {len(layers)} layers are named")
    return None if layers == default else layers


def inputs_of(source: Source, ids: Sequence[int], default: tuple[int, ...], nested: bool) -> tuple[int, ...]:
    """What numbers of layers mean, as inputs of layers.

    vLLM and ``speculators`` number inputs; SGLang and SpecForge outputs, and the output of layer k is the input of
    layer k + 1. Numbers that are EAGLE-3's in one of the two ways are taken so, others must be explained.
    """
    readings = {"inputs": tuple(ids), "outputs": tuple(layer + 1 for layer in ids)}
    usual = "inputs" if nested else next((name for name, layers in readings.items() if layers == default), None)
    how = source.given.get("layer_ids", usual)
    if how is None:
        engines = "vLLM reads them as inputs of layers, SGLang as outputs"
        raise UserError(f"{source.config}: {TAPS} are {ids}; {engines}: give --set layer_ids=inputs or =outputs")
    return readings[how]
