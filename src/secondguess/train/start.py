"""The start point of a run: a new drafter, or one that was trained before, and its optimizer."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from secondguess.drafter.checkpoint import load_drafter
from secondguess.drafter.fit import drafter_config, final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise
from secondguess.drafter.shipped import find_drafter
from secondguess.drafter.vocab import choose_vocab
from secondguess.errors import require
from secondguess.target.hf import HFTarget
from secondguess.train.config import TrainConfig


def start_drafter(target: HFTarget, config: TrainConfig, counts: Tensor) -> Drafter:
    """On the CPU. ``counts`` [target vocabulary] of answer tokens choose the draft vocabulary of a new drafter."""
    if config.warm_start != "none":
        return warm_drafter(target, config)
    return new_drafter(target, config, choose_vocab(counts, config.draft_vocab_size))


def new_drafter(target: HFTarget, config: TrainConfig, target_ids: Tensor) -> Drafter:
    """A drafter for ``target`` at its start point."""
    shape = drafter_config(target.model, config.draft_vocab_size, config.second_look, config.num_layers, config.lens)
    drafter = Drafter(shape, target.embedding.detach().float().cpu(), target_ids)
    initialise(drafter, head_rows(target.head_weight, target_ids), final_norm_gain(target.model), config.seed)
    return drafter


def warm_drafter(target: HFTarget, config: TrainConfig) -> Drafter:
    """The drafter that ``warm_start`` names, with its vocabulary.

    What level 1 has of its own and it lacks is a new drafter's, what the method has no use for is dropped. Raises UserError if
    there is no such drafter, or it does not fit the target or the settings.
    """
    embedding = target.embedding.detach().float().cpu()
    folder = find_drafter(config.warm_start, config.warm_start, embedding)
    found = load_drafter(folder, embedding, target.spec.num_layers)
    other = f"drafter {folder} has num_layers={found.config.num_layers}, not {config.num_layers}"
    require(found.config.num_layers == config.num_layers, f"{other}: set num_layers, or start from another")
    require(
        found.config.tap_layers is None, f"drafter {folder} reads layers of its own: training feeds EAGLE-3's three"
    )
    drafter = Drafter(replace(found.config, second_look=config.second_look, lens=config.lens), found.embedding, found.target_ids)
    drafter.target_embedding = found.target_embedding
    initialise(drafter, head_rows(target.head_weight, found.target_ids), final_norm_gain(target.model), config.seed)
    drafter.load_state_dict(found.state_dict(), strict=False)  # only level 1's own may differ
    return drafter


def content(drafter: Drafter) -> str:
    """Changes with any weight."""
    digest = hashlib.sha256()
    for name, weight in drafter.state_dict().items():
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def new_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: norms and the self-query are scales and a place, not weights."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
