"""Drafting for SGLang's requests. It keeps no books: where requests stand, SGLang says at every call.

R requests, E new pairs, T taps, H hidden; S rows of SGLang's table, P positions; of attention X rows, W columns,
A heads, G K/V heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.passes import Pairs, Passes, Round, attention
from secondguess.integrations.sglang.located import LocatedCache
from secondguess.tree.grow import grow
from secondguess.tree.rows import Root
from secondguess.types import DraftTree, Rows

COPIED_BYTES = 512 * 2**20  # of K/V at once, or those of one request


@dataclass(frozen=True, slots=True)
class Places:
    """Where the requests of a batch stand."""

    slots_R: Tensor  # int64: their rows in SGLang's table
    lengths_R: Tensor  # int64: positions that the target has K/V of
    longest: int


class TreeDrafting(Passes[LocatedCache]):
    """One drafter and one shape of trees."""

    def __init__(self, drafter: Drafter, config: TreeConfig, table_SP: Tensor, num_places: int) -> None:
        """``table_SP``: SGLang's ``req_to_token``, of places below ``num_places``."""
        c, dtype = drafter.config, drafter.norm.weight.dtype
        shapes = [(c.num_key_value_heads, c.head_dim)] * c.num_layers
        num_scratch = config.num_steps * config.rows_per_step
        super().__init__(drafter, config, LocatedCache(table_SP, num_places, num_scratch, shapes, dtype))

    @torch.no_grad()
    def read(self, at: Places, tokens_RE: Tensor, taps_RETH: Tensor, counts_R: Tensor) -> Tensor:
        """Read the pairs that come after what was read before: of each request ``counts_R``, then padding.

        Pair p is the target's states at position p and the token at position p + 1. Returns what the next draft begins
        with: the newest pair's features [R, H].
        """
        self.cache.aim(at.lengths_R + counts_R)
        width = at.longest + tokens_RE.shape[1]
        return self.extend(Pairs((), at.slots_R, tokens_RE, taps_RETH, at.lengths_R, counts_R, width, width))

    @torch.no_grad()
    def draft(self, at: Places, roots_R: Tensor, features_RH: Tensor) -> DraftTree:
        """A tree for each request over its newest token, int64, at position ``lengths_R``.

        ``features_RH``: what ``read`` returned last.
        """
        self.cache.aim(at.lengths_R)
        none_R0, zeros_R = roots_R[:, None][:, :0], torch.zeros_like(at.lengths_R)
        settled = Pairs((), at.slots_R, none_R0, none_R0, at.lengths_R, zeros_R, 0, at.longest)
        round_ = Round(self, settled, features_RH)
        return grow(self.config, Root(roots_R, round_.root_offers()), round_.forward)

    def attend(self, layer: int, rows: Rows, q_RAXD: Tensor, k_RGXD: Tensor, v_RGXD: Tensor) -> Tensor:
        """For some requests at a time: K/V that lie anywhere are copied to be read, as far as the longest text goes."""
        self.cache.store(layer, rows, k_RGXD, v_RGXD)
        R, _, W = rows.visible_RNW.shape
        places_RW = self.cache.places(rows.slots_R, torch.arange(W, device=rows.slots_R.device).expand(R, -1))
        few = max(1, COPIED_BYTES // (W * self.cache.bytes_of_place(layer)))
        parts = zip(rows.visible_RNW.split(few), q_RAXD.split(few), places_RW.split(few), strict=True)
        return torch.cat([attention(seen, q, *self.cache.read(layer, places)) for seen, q, places in parts])
