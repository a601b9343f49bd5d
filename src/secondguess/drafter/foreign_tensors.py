"""The tensors of EAGLE-3 drafters of other trainers, under this package's names and in its order."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secondguess.drafter.checkpoint import EMBEDDING, agree, check_numbers, load_tensors
from secondguess.drafter.fit import head_rows
from secondguess.drafter.speculators_form import flat_names
from secondguess.drafter.vocab import from_offsets
from secondguess.errors import UserError
from secondguess.target.hf import HFTarget

HEAD = "lm_head.weight"
# SGLang's older names.
RENAMED = {f"aux_norm_{depth}.weight": f"fc_norm.{i}.weight" for i, depth in enumerate(("low", "mid", "high"))}
COMPUTED = "rotary_emb.inv_freq"  # some tools save it; it follows from the config
# Tensors that are there if and only if a flag is on.
MARKS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}


@dataclass(frozen=True, slots=True)
class Source:
    """A folder to import from, and for whom. ``given``: settings by hand; ``remarks``: what was decided on the way."""

    folder: Path
    target: HFTarget
    given: Mapping[str, Any]
    remarks: list[str] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "config.json"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in ``folder``, whatever the files are called. Raises UserError if they are no EAGLE-3 drafter's."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_tensors(path)
    for path in sorted(folder.glob("pytorch_model*.bin")) if not found else []:
        found |= load_pickle(path)
    tensors = {RENAMED.get(n, n): t for n, t in flat_names(found).items() if not n.endswith(COMPUTED)}
    if not {"fc.weight", "midlayer.hidden_norm.weight"} <= tensors.keys():
        what = "an EAGLE-1 or EAGLE-2 drafter" if "fc.weight" in tensors else "no EAGLE-3 drafter"
        raise UserError(f"{folder} holds {what}: only EAGLE-3 and EAGLE-3.1 can be imported")
    return tensors


def load_pickle(path: Path) -> dict[str, Tensor]:
    """A file of torch's, of which nothing but tensors is read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is not a readable file of weights ({error}): the drafter is damaged") from None


def check_marks(tensors: Mapping[str, Tensor], flags: Mapping[str, bool], folder: Path) -> None:
    """Raises UserError when a flag and its tensors say different things: the most common loss between two tools."""
    for flag, name in MARKS.items():
        if flags[flag] and name not in tensors:
            raise UserError(f"{folder}: {flag} is true, but {name} is missing: the drafter is damaged")
        if name in tensors and not flags[flag]:
            lost = f"{flag} is false, but there is {name}: the flag was lost"
            raise UserError(f"{folder}: {lost}, give --set {flag}=true")


def take_target_ids(source: Source, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Remove the vocabulary maps; return the target ids, ascending, with the head's rows put into that order.

    A drafter without a head has the target's rows, as engines lend them.
    """
    ids = read_map(source, tensors.pop("d2t", None), tensors.pop("t2d", None), config)
    order = ids.argsort()
    head = tensors.get(HEAD)
    if head is None:
        if config["hidden_size"] != config["target_hidden_size"]:
            raise UserError(f"{source.folder}: {HEAD} is missing: the drafter is damaged")
        source.remarks.append("it has no head: it gets the target's")
        theirs = source.target.head_weight
        head = head_rows(theirs, ids.to(theirs.device)).cpu().to(tensors["fc.weight"].dtype)
    if len(head) != len(ids):
        tied = ": tie_word_embeddings put the embedding there?" if config.get("tie_word_embeddings") else ""
        raise UserError(f"{source.folder}: {HEAD} has {len(head)} rows for a draft vocabulary of {len(ids)}{tied}")
    tensors[HEAD] = head[order]
    return ids[order]


def read_map(source: Source, d2t: Tensor | None, t2d: Tensor | None, config: Mapping[str, Any]) -> Tensor:
    """int64 [draft vocabulary]: target id of each row of the head. ``d2t`` are offsets, or token ids by mistake."""
    folder, draft, vocab = source.folder, config["draft_vocab_size"], config["vocab_size"]
    if d2t is None:
        if draft < vocab:
            lost = f"d2t is missing, so it is not known which {draft} of the {vocab} tokens the drafter offers"
            raise UserError(f"{folder}: {lost}: get the file that has it")
        return torch.arange(draft)
    if d2t.shape != (draft,) or d2t.is_floating_point():
        raise UserError(f"{folder}: d2t must hold {draft} whole numbers: the drafter is damaged")
    offsets = d2t.long()
    ids = from_offsets(offsets)
    marked = None if t2d is None else t2d.bool()
    if marked is not None and not agree(ids.sort().values, marked):
        if not agree(offsets.sort().values, marked):
            raise UserError(f"{folder}: t2d and d2t disagree: the drafter is damaged")
        source.remarks.append("d2t held token ids where offsets belong: read as ids, since t2d says the same")
        return offsets
    if marked is None and draft > 1 and bool((offsets.diff() > 0).all()):
        raise UserError(f"{folder}: d2t rises at every step, as ids do and offsets (id - index) do not: write offsets")
    if ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < draft:
        raise UserError(f"{folder}: d2t names a token twice, or one outside the vocabulary: the drafter is damaged")
    return ids


def take_embedding(source: Source, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Tensor | None:
    """Remove the embedding [vocabulary, hidden] and return it, unless it is the target's, or the target's is wanted."""
    folder, wanted, table = source.folder, source.given.get("own_embedding"), tensors.pop(EMBEDDING, None)
    if table is None:
        if wanted:
            raise UserError(f"{folder} has no {EMBEDDING}: leave --set own_embedding=true out")
        return None
    if table.shape != (config["vocab_size"], config["hidden_size"]):
        raise UserError(f"{folder}: {EMBEDDING} is {tuple(table.shape)}: the drafter is damaged")
    check_numbers(table, EMBEDDING, folder)
    if wanted is False:
        source.remarks.append("its embedding is left out, as asked")
        return None
    theirs = source.target.embedding.detach().to("cpu", torch.bfloat16)
    if table.shape == theirs.shape and torch.equal(table.bfloat16(), theirs):
        source.remarks.append("its embedding is the target's: not kept twice")
        return None
    return table.float()
