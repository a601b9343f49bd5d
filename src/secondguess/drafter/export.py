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

from secondguess.drafter.card import card
from secondguess.drafter.checkpoint import QUERY, WEIGHTS, build, load_tensors, write_tensors
from secondguess.drafter.folder import new_folder
from secondguess.drafter.settings import read_settings, to_json
from secondguess.drafter.speculators_form import flat_names, nested, nested_names
from secondguess.target.facts import recorded

FORMS = ("eagle3", "speculators")
CHAIN = 5  # draft tokens of an engine that drafts no tree


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
    flat = to_json(shape, block["target_embedding"], block) | {"dtype": stored}
    base_model = base_model or block.get("target", "the target")
    with new_folder(folder) as temporary:
        write_tensors(tensors if form == "eagle3" else nested_names(tensors), temporary / WEIGHTS)
        if shape.level1_tensors:
            (temporary / QUERY).parent.mkdir()
            shutil.copyfile(source / QUERY, temporary / QUERY)
        config = flat if form == "eagle3" else nested(flat, base_model, architectures(block), CHAIN)
        (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        assert read_settings(temporary)[0] == shape, "what was written is read as something else"
        (temporary / "README.md").write_text(card(folder.name, form, shape, block, base_model), encoding="utf-8")
    if shape.max_position_embeddings is None:
        return ["it is not known how far the drafter goes, and other engines take 2048 then: --max-positions sets it"]
    return []


def architectures(block: dict[str, Any]) -> list[str]:
    known = recorded(block).architecture
    return [] if known is None else [known]
