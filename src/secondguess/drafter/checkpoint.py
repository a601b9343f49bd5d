"""Drafter checkpoints: the flat EAGLE-3 format, plus what is level 1's own in a sub-folder that other engines ignore.

    config.json            see ``settings``: LlamaForCausalLMEagle3 with fc_norm and norm_output (EAGLE-3.1)
    model.safetensors      fc, fc_norm.*, midlayer.*, norm, lm_head, d2t, t2d; embed_tokens if it is not the target's;
                           layers.1.* where there is a second layer (num_hidden_layers 2)
    reconsider/query.safetensors     what only second looks use: self_query [hidden], lens.weight [2 hidden, hidden]

Stock engines load it as EAGLE-3.1. Unknown or missing tensors, and settings of another network, are errors here. The
``speculators`` form is read, too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from secondguess.atomic import replacing
from secondguess.config import DrafterConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.settings import read_settings, to_json
from secondguess.drafter.speculators_form import flat_names
from secondguess.drafter.vocab import from_offsets, to_offsets
from secondguess.errors import UserError
from secondguess.target.base import Target
from secondguess.target.facts import trained_opening
from secondguess.target.fingerprint import embedding_fingerprint

WEIGHTS = "model.safetensors"
QUERY = Path("reconsider") / "query.safetensors"
EMBEDDING = "embed_tokens.weight"
STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter as it was loaded from ``folder``, and the ``secondguess`` block of its config."""

    folder: Path
    block: dict[str, Any]
    drafter: Drafter


def save_drafter(drafter: Drafter, folder: Path, notes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint. ``notes`` (training record, target name) goes into the config's ``secondguess`` block."""
    folder.mkdir(parents=True, exist_ok=True)
    state = state_of(drafter, dtype)
    level1 = {name: state.pop(name) for name in drafter.config.level1_tensors}
    write_tensors(state, folder / WEIGHTS)
    if level1:
        (folder / QUERY).parent.mkdir(exist_ok=True)
        write_tensors(level1, folder / QUERY)
    notes = {**notes, "draft_vocab": ids_hash(drafter.target_ids)}
    config = to_json(drafter.config, drafter.target_embedding, notes)
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=1) + "\n")


def state_of(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU, those that have a file of their own among them."""
    state: dict[str, Tensor] = dict(drafter.named_parameters())
    if drafter.config.own_embedding:
        state[EMBEDDING] = drafter.embedding
    state = {name: p.detach().to("cpu", dtype).contiguous() for name, p in state.items()}
    target_ids = drafter.target_ids.cpu()
    return state | {"d2t": to_offsets(target_ids), "t2d": offered(target_ids, drafter.config.vocab_size)}


def ids_hash(target_ids: Tensor) -> str:
    """Tells draft vocabularies apart: another one of the same size would shift the meaning of every row of the head."""
    return hashlib.sha256(target_ids.cpu().numpy().tobytes()).hexdigest()[:16]


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


def load_checkpoint(folder: Path, embedding: Tensor, target_num_layers: int) -> Checkpoint:
    """Read a checkpoint for the target whose ``embedding`` [vocabulary, hidden] is given; parameters in its dtype.

    Raises UserError if the folder is no EAGLE-3.1 / PR checkpoint, is damaged, or belongs to another target.
    """
    shape, block = read_settings(folder)
    check_target(shape, block, embedding, target_num_layers, folder)
    return Checkpoint(folder, block, read_drafter(folder, shape, block, embedding))


def load_drafter(folder: Path, embedding: Tensor, target_num_layers: int) -> Drafter:
    """As ``load_checkpoint``, the drafter alone."""
    return load_checkpoint(folder, embedding, target_num_layers).drafter


def read_drafter(folder: Path, shape: DrafterConfig, block: dict[str, Any], embedding: Tensor) -> Drafter:
    """What the settings ``shape`` and ``block`` of a checkpoint say of its tensors must be so."""
    drafter = build(folder, shape, embedding)
    drafter.target_embedding, drafter.answer_start = block["target_embedding"], trained_opening(block)
    vocab = ids_hash(drafter.target_ids)
    if block.get("draft_vocab", vocab) != vocab:
        raise UserError(f"{folder}: d2t is not the one that the head was trained with: the drafter is damaged")
    return drafter.to(embedding.device, embedding.dtype).eval()


def build(folder: Path, shape: DrafterConfig, embedding: Tensor) -> Drafter:
    """The drafter of a checkpoint; every tensor has been checked. ``embedding`` is taken unless it has its own."""
    tensors = flat_names(load_tensors(folder / WEIGHTS))
    if shape.level1_tensors:
        tensors |= load_tensors(folder / QUERY)
    target_ids = take_vocab(tensors, shape, folder)
    table = take_embedding(tensors, shape, folder).to(embedding) if shape.own_embedding else embedding
    return filled(shape, table, target_ids.to(embedding.device), tensors, folder)


def filled(
    shape: DrafterConfig, table: Tensor, target_ids: Tensor, tensors: dict[str, Tensor], folder: Path
) -> Drafter:
    """The drafter with every one of ``tensors``, whose names and shapes must be its own."""
    with torch.device("meta"):  # sizes that are not the tensors' take no memory
        check_shapes(Drafter(shape, table, target_ids), tensors, folder)
    drafter = Drafter(shape, table, target_ids)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            check_numbers(tensors[name], name, folder)
            parameter.copy_(tensors[name])
    return drafter


def open_checkpoint(folder: Path, target: Target) -> Checkpoint:
    """As ``load_checkpoint``, and ``target`` taps from now on what the drafter reads."""
    checkpoint = load_checkpoint(folder, target.embedding, target.spec.num_layers)
    tap_for(checkpoint.drafter, target)
    return checkpoint


def load_for(folder: Path, target: Target) -> Drafter:
    """As ``open_checkpoint``, the drafter alone."""
    return open_checkpoint(folder, target).drafter


def tap_for(drafter: Drafter, target: Target) -> None:
    """``target`` taps from now on what the drafter reads, which finds it there."""
    if drafter.config.tap_layers:
        drafter.tap_index = target.tap(drafter.config.tap_layers)


def check_target(c: DrafterConfig, ours: dict[str, Any], embedding: Tensor, num_layers: int, folder: Path) -> None:
    """Raises UserError that says in what the target is not the one that the drafter was trained for."""
    (vocab_size, hidden_size), known = embedding.shape, ours["target_embedding"]
    for what, theirs, here in (
        ("hidden size", c.target_hidden_size, hidden_size),
        ("number of layers", c.target_num_layers, num_layers),
        ("vocabulary size", c.vocab_size, vocab_size),
        ("hash of the token embedding", known, embedding_fingerprint(embedding)),
    ):
        if theirs != here:
            made_for, fix = ours.get("target", "another model"), "train or choose one for it"
            if embedding.dtype == torch.float16:
                fix = "or it is, and float16 hides it: load the target in bfloat16 or float32"
            different = f"{what} {theirs}, here {here}"
            raise UserError(f"drafter {folder} was trained for {made_for}, not for this target ({different}): {fix}")


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
    if not agree(ids, t2d) and agree(d2t, t2d):
        raise UserError(f"{folder}: d2t holds token ids where offsets belong (id - index): the drafter is damaged")
    if ids.min() < 0 or ids.max() >= c.vocab_size:
        raise UserError(f"{folder}: d2t points outside the target's vocabulary: the drafter is damaged")
    if len(t2d) != c.vocab_size or not agree(ids, t2d):
        raise UserError(f"{folder}: t2d and d2t disagree: the drafter is damaged")
    return ids


def agree(ids: Tensor, t2d: Tensor) -> bool:
    """Whether ``ids`` are the places where ``t2d`` is True, ascending."""
    return t2d.dtype == torch.bool and torch.equal(ids, t2d.nonzero().flatten())


def take_embedding(tensors: dict[str, Tensor], c: DrafterConfig, folder: Path) -> Tensor:
    """Remove the drafter's own embedding [vocab_size, hidden_size] from ``tensors``."""
    table = tensors.pop(EMBEDDING, None)
    if table is None or table.shape != (c.vocab_size, c.hidden_size):
        raise UserError(f"{folder}: {EMBEDDING} must be {(c.vocab_size, c.hidden_size)}: the drafter is damaged")
    check_numbers(table, EMBEDDING, folder)
    return table


def check_shapes(drafter: Drafter, tensors: dict[str, Tensor], folder: Path) -> None:
    """Names and shapes must match exactly."""
    parameters = dict(drafter.named_parameters())
    wrong = sorted(parameters.keys() ^ tensors.keys())
    if wrong:
        raise UserError(f"{folder}: missing or unknown tensors: {', '.join(wrong)}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(f"{folder}: {name} is {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}")


def check_numbers(tensor: Tensor, name: str, folder: Path) -> None:
    """Raises UserError for quantised weights, and for one that is not finite: it makes every sum so."""
    if tensor.dtype not in STORED:
        raise UserError(f"{folder}: {name} is {tensor.dtype}: it must be bfloat16, float16, float32 or float64")
    if not tensor.sum(dtype=torch.float32).isfinite():
        raise UserError(f"{folder}: {name} holds a value that is not finite: the drafter is damaged")
