"""Drafter checkpoints: the flat EAGLE-3 format, plus the self-query in a sub-folder that other engines ignore.

    config.json            LlamaForCausalLMEagle3 with fc_norm and norm_output (EAGLE-3.1), and a "secondguess" block
    model.safetensors      fc, fc_norm.*, midlayer.*, norm, lm_head, d2t, t2d; no embedding, it is the target's
    reconsider/query.safetensors     PR only: self_query [hidden]

Stock engines load it as EAGLE-3.1. Unknown or missing tensors and flags are errors here, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from secondguess.config import DrafterConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.vocab import from_offsets, to_offsets
from secondguess.errors import UserError
from secondguess.target.fingerprint import embedding_fingerprint

ARCHITECTURE = "LlamaForCausalLMEagle3"
QUERY = Path("reconsider") / "query.safetensors"
FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "norm_before_residual": False}
SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "target_hidden_size", "rms_norm_eps",
)  # fmt: skip


def save_drafter(drafter: Drafter, folder: Path, notes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint. ``notes`` (training record, target name) goes into the config's ``secondguess`` block."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    query = state.pop("self_query", None)
    state["d2t"] = to_offsets(drafter.target_ids.cpu())
    state["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool).index_fill(
        0, drafter.target_ids.cpu(), True
    )
    write_tensors(state, folder / "model.safetensors")
    if query is not None:
        (folder / QUERY).parent.mkdir(exist_ok=True)
        write_tensors({"self_query": query}, folder / QUERY)
    config = config_to_json(drafter, notes)
    temporary = folder / "config.json.partial"
    temporary.write_text(json.dumps(config, indent=1) + "\n")
    temporary.rename(folder / "config.json")


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(path)


def config_to_json(drafter: Drafter, notes: dict[str, Any]) -> dict[str, Any]:
    shape = asdict(drafter.config)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **{key: shape[key] for key in SHAPE_KEYS},
        "rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
        "rope_theta": shape["rope_theta"],
        **FLAGS,
        "secondguess": {
            "target_num_layers": shape["target_num_layers"],
            "target_embedding": embedding_fingerprint(drafter.embedding),
            "reconsideration": shape["reconsideration"],
            **notes,
        },
    }


def load_drafter(folder: Path, embedding: Tensor, target_num_layers: int) -> Drafter:
    """Read a checkpoint for the target whose ``embedding`` [vocabulary, hidden] is given; parameters in its dtype.

    Raises UserError if the folder is no EAGLE-3.1 / PR checkpoint or belongs to another target.
    """
    config = read_config(folder)
    ours = config["secondguess"]
    if ours["target_embedding"] != embedding_fingerprint(embedding) or ours["target_num_layers"] != target_num_layers:
        made_for = ours.get("target", "another model")
        raise UserError(f"drafter {folder} was trained for {made_for}, not for this target: train or choose one for it")
    shape = DrafterConfig(
        **{key: config[key] for key in SHAPE_KEYS},
        rope_theta=config["rope_theta"],
        target_num_layers=target_num_layers,
        reconsideration=ours["reconsideration"],
    )
    tensors = load_tensors(folder / "model.safetensors")
    target_ids = from_offsets(tensors.pop("d2t"))
    tensors.pop("t2d")
    if shape.reconsideration:
        tensors |= load_tensors(folder / QUERY)
    drafter = Drafter(shape, embedding, target_ids.to(embedding.device))
    assign(drafter, tensors, folder)
    return drafter.to(embedding.device, embedding.dtype).eval()


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no drafter at {folder}: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is not JSON: the drafter is damaged") from None
    if config.get("architectures") != [ARCHITECTURE] or "secondguess" not in config:
        raise UserError(
            f"{folder} is not a secondguess drafter: its config.json has no {ARCHITECTURE} / secondguess block"
        )
    for flag, value in FLAGS.items():
        if config.get(flag) is not value:
            raise UserError(f"{path}: {flag} must be {str(value).lower()} for EAGLE-3.1, got {config.get(flag)!r}")
    missing = [key for key in (*SHAPE_KEYS, "rope_theta") if key not in config]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: the drafter is damaged")
    return config


def load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} is missing: the drafter is incomplete")
    try:
        return load_file(path)
    except Exception as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): the drafter is damaged") from None


def assign(drafter: Drafter, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy every tensor into its parameter; names and shapes must match exactly."""
    parameters = dict(drafter.named_parameters())
    wrong = sorted(parameters.keys() ^ tensors.keys())
    if wrong:
        raise UserError(f"{folder}: missing or unknown tensors: {', '.join(wrong)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise UserError(f"{folder}: {name} is {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}")
            parameter.copy_(tensors[name])
