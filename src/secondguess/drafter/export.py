"""A drafter in the forms that other engines load.

    config.json          ``eagle3``: the flat form (vLLM, SGLang); ``speculators``: vLLM's, which names the target, too
    model.safetensors    the same tensors, bit for bit
    reconsider/          PR only: the self-query, where engines that only know EAGLE-3.1 do not look
    README.md            the model card

This package reads both.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from secondguess.atomic import replacing
from secondguess.config import CHAIN, DrafterConfig
from secondguess.drafter.card import Names, card, published
from secondguess.drafter.checkpoint import QUERY, WEIGHTS, build, load_tensors, write_tensors
from secondguess.drafter.folder import new_folder
from secondguess.drafter.settings import read_json, read_settings, to_json
from secondguess.drafter.shipped import HUB_ID
from secondguess.drafter.speculators_form import KIND, flat_names, nested, nested_names
from secondguess.target.facts import recorded
from secondguess.target.load import DEFAULT

FORMS = ("eagle3", "speculators")
HUB_IDS = {DEFAULT: "HuggingFaceTB/SmolLM2-135M-Instruct"}  # what other engines call the targets that have an alias


def export(source: Path, form: str, folder: Path, base_model: str | None, max_positions: int | None) -> list[str]:
    """Write the drafter in ``source`` to the new ``folder``; returns what its user should know.

    ``base_model``: the name under which others find the target. ``max_positions``: what the config says how far the
    drafter goes, if the checkpoint does not. Raises UserError if the checkpoint is damaged.
    """
    shape, block = read_settings(source)
    if max_positions is not None:
        shape = replace(shape, max_position_embeddings=max_positions)
    build(source, shape, torch.zeros(1, 1).expand(shape.vocab_size, shape.hidden_size))  # is it whole?
    tensors = flat_names(load_tensors(source / WEIGHTS))
    stored = str(tensors["norm.weight"].dtype).removeprefix("torch.")
    names = names_of(folder, block, base_model)
    block = published(block, names)
    flat = to_json(shape, block["target_embedding"], block) | {"dtype": stored}
    with new_folder(folder) as temporary:
        write_tensors(tensors if form == "eagle3" else nested_names(tensors), temporary / WEIGHTS)
        if shape.level1_tensors:
            (temporary / QUERY).parent.mkdir()
            shutil.copyfile(source / QUERY, temporary / QUERY)
        config = flat if form == "eagle3" else nested(flat, names.base_model, architectures(block), CHAIN)
        (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        assert read_settings(temporary)[0] == shape, "what was written is read as something else"
        (temporary / "README.md").write_text(card(names, form, shape, block), encoding="utf-8")
    return remarks(shape, names.base_model)


def write_card(folder: Path, base_model: str | None) -> None:
    """Write the card of the drafter in ``folder`` into it, as ``export`` does."""
    shape, block = read_settings(folder)
    names = names_of(folder.resolve(), block, base_model)
    form = "speculators" if KIND in read_json(folder) else "eagle3"
    with replacing(folder / "README.md") as temporary:
        temporary.write_text(card(names, form, shape, published(block, names)), encoding="utf-8")


def names_of(folder: Path, block: dict[str, Any], base_model: str | None) -> Names:
    """An alias of ours means nothing to others, and stays what we call the target."""
    target = block.get("target", "the target")
    base_model = base_model or HUB_IDS.get(target, target)
    return Names(folder.name, base_model, target if target in HUB_IDS else base_model)


def remarks(shape: DrafterConfig, base_model: str) -> list[str]:
    found = []
    if shape.max_position_embeddings is None:
        unknown = "it is not known how far the drafter goes, and other engines take 2048 then"
        found.append(f"{unknown}: --max-positions sets it")
    if not HUB_ID.fullmatch(base_model) or Path(base_model).exists():
        found.append(f"{base_model!r} is no name under which others find the target: --base-model NAME sets its hub id")
    return found


def architectures(block: dict[str, Any]) -> list[str]:
    known = recorded(block).architecture
    return [] if known is None else [known]
