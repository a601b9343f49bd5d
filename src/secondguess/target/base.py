"""What the engine, the drafter and the trainer need of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from secondguess.engine.slots import SlotCache
from secondguess.errors import UserError
from secondguess.types import Rows, TargetOut


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """Shape of a target. ``layer_shapes`` are (K/V heads, head dimension) of each layer's cache."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_len: int
    layer_shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    mode: str  # the numbers it computes with: the dtype, or the form of weights that are kept in fewer bits
    device: torch.device
    eos_token_ids: frozenset[int]
    tap_layers: tuple[int, ...]  # EAGLE-3's three, then those that a drafter has asked for


class Target(Protocol):
    """A causal language model that runs rows over a slot cache."""

    @property
    def spec(self) -> TargetSpec: ...

    @property
    def fingerprint(self) -> str:
        """Differs between models with different weights, precision or config."""
        ...

    @property
    def forward_id(self) -> str:
        """Names the code that runs the layers: what it writes may part at a near-tie from what another writes."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[V, H], the stored weights. Gemma 3 multiplies a looked-up row by sqrt(H); this is the unscaled row."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """[V, H]. Logits may be soft-capped after it (Gemma 3's ``final_logit_softcapping``)."""
        ...

    def tap(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Places of ``layers`` among ``spec.tap_layers``, where those that were not tapped yet are from now on."""
        ...

    def new_cache(self, num_slots: int, num_columns: int) -> SlotCache: ...

    def forward(self, rows: Rows, cache: SlotCache, last_only: bool = False) -> TargetOut:
        """Run the rows and store their K/V. ``last_only``: logits of the last row of each request, [R, 1, V]."""
        ...

    def logits(self, hidden_RNH: Tensor) -> Tensor:
        """The output head over states that ``forward`` returned: [..., H] -> [..., V]."""
        ...


def causal_rows(slots_R: Tensor, tokens_RN: Tensor, start: int = 0) -> Rows:
    """Texts from their beginning, or from token ``start`` on if what is before it is in the cache.

    One column per token; padding at the end is seen by padding only.
    """
    r, n = tokens_RN.shape
    index_RW = torch.arange(start + n, device=tokens_RN.device).expand(r, -1)
    visible_NW = torch.ones(n, start + n, dtype=torch.bool, device=tokens_RN.device).tril(start)
    return Rows(
        slots_R=slots_R,
        tokens_RN=tokens_RN,
        positions_RN=index_RW[:, start:],
        columns_RN=index_RW[:, start:],
        visible_RNW=visible_NW.expand(r, -1, -1),
        column_positions_RW=index_RW,
        slots=tuple(slots_R.tolist()),
    )


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs EAGLE-3 taps. Raises UserError when the model is too shallow for three distinct ones."""
    taps = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        raise UserError(f"the target has {num_layers} layers; three distinct tapped layers need at least 7")
    return taps
