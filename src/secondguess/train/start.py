"""The start point of a run: a new drafter, or one that was trained before, and its optimizer."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secondguess.config import DrafterConfig
from secondguess.drafter.checkpoint import check_target, load_checkpoint
from secondguess.drafter.checks import examine, warn
from secondguess.drafter.fit import drafter_config, final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise, start_further, start_level1
from secondguess.drafter.settings import read_block, read_settings
from secondguess.drafter.shipped import find_drafter, public_name
from secondguess.drafter.vocab import choose_vocab, grow_vocab
from secondguess.errors import require
from secondguess.target.hf import HFTarget
from secondguess.train.config import DRAFT_VOCABULARY, TrainConfig

# Of a training.
SPENT = ("num_responses", "trained_length", "steps", "seconds", "wall_seconds", "num_processes", "start")


def start_drafter(target: HFTarget, config: TrainConfig, counts: Tensor) -> Drafter:
    """On the CPU. ``counts`` [target vocabulary] of answer tokens choose the tokens of a new or larger vocabulary."""
    if config.warm_start != "none":
        return warm_drafter(target, config, counts)
    size = config.draft_vocab_size or min(DRAFT_VOCABULARY, counts.numel())
    return new_drafter(target, config, choose_vocab(counts, size))


def new_drafter(target: HFTarget, config: TrainConfig, target_ids: Tensor) -> Drafter:
    """A drafter for ``target`` at its start point."""
    shape = drafter_config(target.model, target_ids.numel(), **config.network)
    drafter = Drafter(shape, target.embedding.detach().float().cpu(), target_ids)
    initialise(drafter, head_rows(target.head_weight, target_ids), final_norm_gain(target.model), config.seed)
    return drafter


def warm_drafter(target: HFTarget, config: TrainConfig, counts: Tensor) -> Drafter:
    """The drafter that ``warm_start`` names, with its vocabulary, to which tokens may be added.

    What level 1 has of its own and it lacks is a new drafter's, what the method has no use for is dropped; layers that
    it lacks start as the identity. Raises UserError if there is no such drafter, or it does not fit the target or the
    settings.
    """
    embedding = target.embedding.detach().float().cpu()
    folder = find_drafter(config.warm_start, config.warm_start, embedding)
    checkpoint = load_checkpoint(folder, embedding, target.spec.num_layers)
    warn(folder, examine(checkpoint, target.facts, embedding))
    found = checkpoint.drafter
    check_start(found.config, config, folder)
    target_ids, head_VH = vocabulary(found, target, config, counts)
    shape = replace(found.config, draft_vocab_size=target_ids.numel(), **config.network)
    drafter = Drafter(shape, found.embedding, target_ids)
    drafter.target_embedding = found.target_embedding
    drafter.tap_index = tuple(range(shape.num_taps))  # it is fed what it reads and nothing else: see tap_layers_of
    start_level1(drafter)
    start_further(drafter, found.config.num_layers, config.seed)
    known = found.state_dict() | {"lm_head.weight": head_VH}
    drafter.load_state_dict(known, strict=False)  # only level 1's own and further layers may differ
    return drafter


def vocabulary(found: Drafter, target: HFTarget, config: TrainConfig, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Target ids [V] and the head's rows [V, H]: those of ``found``, and up to a larger ``draft_vocab_size`` the most
    frequent others with a new drafter's rows, which fit as far as the final norm's weight is still near 1."""
    head_VH = found.lm_head.weight.detach()
    if config.draft_vocab_size in (0, found.config.draft_vocab_size):
        return found.target_ids, head_VH
    target_ids = grow_vocab(counts, found.target_ids, config.draft_vocab_size)
    more_VH = (head_rows(target.head_weight, target_ids) * final_norm_gain(target.model)).cpu()
    more_VH[torch.isin(target_ids, found.target_ids)] = head_VH
    return target_ids, more_VH


def check_start(found: DrafterConfig, config: TrainConfig, folder: Path) -> None:
    """Raises UserError unless training as ``config`` says can start from the drafter in ``folder``."""
    has = f"drafter {folder} has num_layers={found.num_layers}"
    fewer = f"{has}, more than {config.num_layers}: set num_layers, or start from another"
    require(found.num_layers <= config.num_layers, fewer)
    idle = f"shared_loss=none leaves layers as they are, and {has}: more would learn nothing, leave num_layers at that"
    require(found.num_layers == config.num_layers or config.taught_by != "none", idle)
    if config.draft_vocab_size not in (0, found.draft_vocab_size):
        check_growth(found, config, f"drafter {folder} offers {found.draft_vocab_size} tokens")


def check_growth(found: DrafterConfig, config: TrainConfig, offers: str) -> None:
    """Raises UserError unless the vocabulary can become as large as ``config`` says, and training can use it."""
    fix = "leave draft_vocab_size out"
    fewer = f"{offers}, and keeps them: draft_vocab_size={config.draft_vocab_size} is too few, {fix}"
    require(config.draft_vocab_size > found.draft_vocab_size, fewer)
    wide = f"{offers}, and none of the target's can be added, whose head has another width: {fix}"
    require(found.hidden_size == found.target_hidden_size, wide)
    idle = f"{offers}, and shared_loss=none would teach it no others: {fix}"
    require(config.taught_by != "none", idle)


def start_notes(target: HFTarget, config: TrainConfig) -> dict[str, Any]:
    """For the checkpoint's ``training``: which drafter it started from, if any, and what was spent on that one."""
    if config.warm_start == "none":
        return {}
    before = read_block(find_drafter(config.warm_start, config.warm_start, target.embedding)).get("training", {})
    return {"start": {"name": public_name(config.warm_start)} | {key: before[key] for key in SPENT if key in before}}


def tap_layers_of(target: HFTarget, warm_start: str) -> tuple[int, ...] | None:
    """The layers that the drafter to be trained reads, None for EAGLE-3's: those of the one that training starts from.

    Raises UserError if there is no such drafter, or it does not fit the target.
    """
    if warm_start == "none":
        return None
    folder = find_drafter(warm_start, warm_start, target.embedding)
    shape, block = read_settings(folder)
    check_target(shape, block, target.embedding, target.spec.num_layers, folder)
    return shape.tap_layers


def unlike_new(drafter: Drafter, target: HFTarget, config: TrainConfig) -> dict[str, Any] | None:
    """Settings of the network in which a warm start is not what a new drafter would be; None if there are none.

    Another import of the same weights is another start point.
    """
    c = drafter.config
    shape = drafter_config(target.model, c.draft_vocab_size, **config.network)
    new = asdict(replace(shape, max_position_embeddings=c.max_position_embeddings))  # which changes no number
    return {name: value for name, value in asdict(c).items() if value != new[name]} or None


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
