"""Frozen configurations. Every field is validated once, here, with a message that says what to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from secondguess.errors import require


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and the help that its command-line flag shows."""
    return field(default=default, metadata={"help": help})


LIMITS = {
    "budget": (1, 1024),
    "num_steps": (1, 64),
    "grow_width": (1, 256),
    "offer_width": (1, 256),
    "num_reconsider": (0, 256),
}
MAX_OFFERS = 2**20  # in one draft: ``tree.candidates.pack`` numbers them with 20 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeConfig:
    """Shape of the draft tree. Defaults are the paper's (arXiv 2611.05724, Section "Defaults").

    Raises UserError when a field is out of range.
    """

    budget: int = option(48, "draft tokens verified per cycle (the paper's B); above 63, texts may part at near-ties")
    num_steps: int = option(8, "drafter forwards per cycle (gamma)")
    grow_width: int = option(6, "nodes forwarded per draft step (B_w)")
    offer_width: int = option(6, "children offered by one forwarded node (k)")
    num_reconsider: int = option(3, "nodes that get a second look per draft step (m); 0 is EAGLE-3.1")

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            require(value >= low, f"{name} must be at least {low}, got {value}")
            require(value <= high, f"{name} must be at most {high}, got {value}")
        num_offers = self.num_steps * (self.grow_width + self.num_reconsider) * self.offer_width
        too_many = "num_steps x (grow_width + num_reconsider) x offer_width must be below 2^20: lower one"
        require(num_offers < MAX_OFFERS, too_many)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of an EAGLE-3.1 / PR drafter. Field names follow the flat EAGLE-3 ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    target_hidden_size: int
    target_num_layers: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    reconsideration: bool = False  # has a self-query
