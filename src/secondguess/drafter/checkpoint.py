"""Drafter checkpoints: the flat EAGLE-3 format, plus the self-query in a sub-folder that other engines ignore.

    config.json            see ``settings``: LlamaForCausalLMEagle3 with fc_norm and norm_output (EAGLE-3.1)
    model.safetensors      fc, fc_norm.*, midlayer.*, norm, lm_head, d2t, t2d; no embedding, it is the target's
    reconsider/query.safetensors     PR only: self_query [hidden]

Stock engines load it as EAGLE-3.1. Unknown or missing tensors, and settings of another network, are errors here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from secondguess.atomic import replacing
from secondguess.config import DrafterConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.settings import read_settings, to_json
from secondguess.drafter.vocab import from_offsets, to_offsets
from secondguess.errors import UserError
from secondguess.target.fingerprint import embedding_fingerprint

QUERY = Path("reconsider") / "query.safetensors"


def save_drafter(drafter: Drafter, folder: Path, notes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint. ``notes`` (training record, target name) goes into the config's ``secondguess`` block."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    query = state.pop("self_query", None)
    target_ids = drafter.target_ids.cpu()
    state |= {"d2t": to_offsets(target_ids), "t2d": offered(target_ids, drafter.config.vocab_size)}
    write_tensors(state, folder / "model.safetensors")
    if query is not None:
        (folder / QUERY).parent.mkdir(exist_ok=True)
        write_tensors({"self_query": query}, folder / QUERY)
    config = to_json(drafter.config, embedding_fingerprint(drafter.embedding), notes)
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=1) + "\n")


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def offered(target_ids: Tensor, vocab_size: int) -> Tensor:
    """The checkpoint's ``t2d``: bool [vocab_size], True for target tokens in the draft vocabulary."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)


def weights_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's weight files."""
    files = sorted(folder.rglob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def load_drafter(folder: Path, embedding: Tensor, target_num_layers: int) -> Drafter:
    """Read a checkpoint for the target whose ``embedding`` [vocabulary, hidden] is given; parameters in its dtype.

    Raises UserError if the folder is no EAGLE-3.1 / PR checkpoint, is damaged, or belongs to another target.
    """
    shape, ours = read_settings(folder)
    check_target(shape, ours, embedding, target_num_layers, folder)
    tensors = load_tensors(folder / "model.safetensors")
    if shape.reconsideration:
        tensors |= load_tensors(folder / QUERY)
    target_ids = take_vocab(tensors, shape, folder)
    drafter = Drafter(shape, embedding, target_ids.to(embedding.device))
    assign(drafter, tensors, folder)
    return drafter.to(embedding.device, embedding.dtype).eval()


def check_target(c: DrafterConfig, ours: dict[str, Any], embedding: Tensor, num_layers: int, folder: Path) -> None:
    fits = ours["target_embedding"] == embedding_fingerprint(embedding) and c.target_num_layers == num_layers
    if not fits or embedding.shape != (c.vocab_size, c.hidden_size) or c.target_hidden_size != c.hidden_size:
        made_for = ours.get("target", "another model")
        fix = "train or choose one for it"
        if embedding.dtype == torch.float16:
            fix = "or it is, and float16 hides it: load the target in bfloat16 or float32"
        raise UserError(f"drafter {folder} was trained for {made_for}, not for this target: {fix}")


def load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} is missing: the drafter is incomplete")
    try:
        return load_file(path)
    except Exception as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): the drafter is damaged") from None


def take_vocab(tensors: dict[str, Tensor], c: DrafterConfig, folder: Path) -> Tensor:
    """Remove the vocabulary maps from ``tensors`` and return the target ids [draft_vocab_size] they agree on."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None or t2d is None:
        raise UserError(f"{folder}: d2t or t2d is missing: the drafter is damaged")
    if d2t.dtype != torch.int64 or d2t.shape != (c.draft_vocab_size,):
        raise UserError(f"{folder}: d2t must hold {c.draft_vocab_size} int64 offsets: the drafter is damaged")
    ids = from_offsets(d2t)
    if ids.min() < 0 or ids.max() >= c.vocab_size:
        raise UserError(f"{folder}: d2t points outside the target's vocabulary: the drafter is damaged")
    # As many True as draft tokens: no two of them are the same target token.
    if not torch.equal(t2d, offered(ids, c.vocab_size)) or int(t2d.sum()) != len(ids):
        raise UserError(f"{folder}: t2d and d2t disagree: the drafter is damaged")
    return ids


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
