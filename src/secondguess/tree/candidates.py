"""All nodes that a round has offered, as one growing table per request.

R requests, C candidates (0 is the root), X rows of one forward, K offered children. Offer k of row y is candidate
1 + y K + k, so a row's offers are found by arithmetic; merged duplicates and padding stay behind as score -inf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondguess.tree.rows import Root

DEPTH_SHIFT, PARENT_SHIFT = 52, 32  # token ids below 2^32, candidates below 2^20, depths below 2^11


def pack(depths: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Depth, parent index and token in one int64: its order is the order of equal scores."""
    return (depths << DEPTH_SHIFT) + (parents << PARENT_SHIFT) + tokens


def depth_of(keys: Tensor) -> Tensor:
    return keys >> DEPTH_SHIFT


def parent_of(keys: Tensor) -> Tensor:
    return (keys >> PARENT_SHIFT) & ((1 << (DEPTH_SHIFT - PARENT_SHIFT)) - 1)


def token_of(keys: Tensor) -> Tensor:
    return keys & ((1 << PARENT_SHIFT) - 1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every node offered so far. Log-probs live on edges; scores are their sums in root-to-node order."""

    keys_RC: Tensor  # int64: see ``pack``
    logps_RC: Tensor  # float: log-prob of the edge to the parent
    scores_RC: Tensor  # float: path score; -inf where there is no candidate
    holders_RC: Tensor  # int64: the row that holds the edge; its level is the edge's, its feature is the child's input
    fresh_RC: Tensor  # bool: may be grown in the next step
    forwarded_RC: Tensor  # bool: has a level-0 row


@dataclass(frozen=True, slots=True)
class Picks:
    """Nodes to forward. A pick that is not valid pads the batch."""

    nodes_RX: Tensor  # int64 candidate indices
    feature_rows_RX: Tensor  # int64: the row whose feature feeds the node
    valid_RX: Tensor  # bool

    def take(self, chosen_RX: Tensor) -> Picks:
        return Picks(*(field_RX.gather(1, chosen_RX) for field_RX in self._fields()))

    def then(self, others: Picks) -> Picks:
        return Picks(*(torch.cat(pair, 1) for pair in zip(self._fields(), others._fields(), strict=True)))

    def _fields(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.nodes_RX, self.feature_rows_RX, self.valid_RX


def plant(root: Root) -> Candidates:
    """The root alone, with score 0."""
    tokens_R1 = root.tokens_R[:, None]
    zeros_R1 = torch.zeros_like(tokens_R1)
    scores_R1 = torch.zeros_like(root.offers.logps_RXK[:, :, 0])
    return Candidates(pack(zeros_R1, zeros_R1, tokens_R1), scores_R1, scores_R1, zeros_R1, zeros_R1 > 0, zeros_R1 == 0)


def children_of(picks: Picks, num_offers: int) -> Tensor:
    """Candidate indices [R, X, K] of what ``picks``, each fed by its own level-0 row, offered at level 0."""
    first_RX1 = 1 + num_offers * picks.feature_rows_RX[..., None]
    return first_RX1 + torch.arange(num_offers, device=first_RX1.device)


def marked(picks: Picks, num_candidates: int) -> Tensor:
    """bool [R, C]: the candidates among the valid ``picks``. (Padding may name any candidate, a valid pick's too.)"""
    counts_RC = picks.nodes_RX.new_zeros(len(picks.nodes_RX), num_candidates)
    return counts_RC.scatter_add(1, picks.nodes_RX, picks.valid_RX.long()) > 0


def append(
    pool: Candidates,
    nodes_RX: Tensor,
    depths_RX: Tensor,
    tokens_RXK: Tensor,
    logps_RXK: Tensor,
    parent_scores_RX: Tensor | None = None,
) -> Candidates:
    """Add the offers of the next X rows as fresh children of ``nodes_RX``, whose depths are ``depths_RX``.

    ``parent_scores_RX``: what their path scores start from; the scores of ``nodes_RX`` if not given.
    """
    num_rows, num_offers = tokens_RXK.shape[1:]
    first_row = (pool.keys_RC.shape[1] - 1) // num_offers
    rows_X = torch.arange(first_row, first_row + num_rows, device=tokens_RXK.device)
    keys_RXK = pack(depths_RX[..., None] + 1, nodes_RX[..., None], tokens_RXK)
    if parent_scores_RX is None:
        parent_scores_RX = pool.scores_RC.gather(1, nodes_RX)
    scores_RXK = parent_scores_RX[..., None] + logps_RXK
    fresh_RC = (logps_RXK > -torch.inf).flatten(1)
    return Candidates(
        torch.cat((pool.keys_RC, keys_RXK.flatten(1)), 1),
        torch.cat((pool.logps_RC, logps_RXK.flatten(1)), 1),
        torch.cat((pool.scores_RC, scores_RXK.flatten(1)), 1),
        torch.cat((pool.holders_RC, rows_X[:, None].expand_as(tokens_RXK).flatten(1)), 1),
        torch.cat((pool.fresh_RC, fresh_RC), 1),
        torch.cat((pool.forwarded_RC, torch.zeros_like(fresh_RC)), 1),
    )


def follow(pool: Candidates) -> Candidates:
    """Path scores anew from the edges, in root-to-node order: a pass makes one depth more right."""
    scores_RC, parents_RC = pool.scores_RC, parent_of(pool.keys_RC)
    for _ in range(int(depth_of(pool.keys_RC).max())):
        scores_RC = scores_RC.gather(1, parents_RC) + pool.logps_RC
    return replace(pool, scores_RC=scores_RC)
