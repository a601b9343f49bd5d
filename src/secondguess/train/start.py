"""The start point of a run: a new drafter, its optimizer, and the precision of its products."""

from __future__ import annotations

import torch

from secondguess.drafter.fit import drafter_config, final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise
from secondguess.target.hf import HFTarget
from secondguess.train.config import TrainConfig


def use_bfloat16(precision: str) -> bool:
    """``auto`` takes bfloat16 products where the processor multiplies them natively."""
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return precision == "bfloat16" or (precision == "auto" and native())


def new_drafter(target: HFTarget, config: TrainConfig, target_ids: torch.Tensor) -> Drafter:
    """A drafter for ``target`` at its start point."""
    shape = drafter_config(target.model, config.draft_vocab_size, config.method == "pr")
    drafter = Drafter(shape, target.embedding.detach().float(), target_ids)
    initialise(drafter, head_rows(target.head_weight, target_ids), final_norm_gain(target.model), config.seed)
    return drafter


def new_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: norms and the self-query are scales and a place, not weights."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
