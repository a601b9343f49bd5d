"""What the tree and the drafter tell each other.

R requests, K offered children, F nodes grown (level 0), M nodes reconsidered (level 1), X = F + M rows of one
forward, Y rows of the round so far. Rows are numbered as forwarded: row 0 is the root's (the extend pass), then each
step's X rows. The drafter keeps the features and the K/V of all Y rows until the round ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Offers:
    """The children that X rows offer: tokens of a row are distinct, a log-prob of -inf offers nothing."""

    tokens_RXK: Tensor  # int64 target ids
    logps_RXK: Tensor  # float, at most 0: log-probs at temperature 1
    confidence_RX: Tensor  # float: the row's top-1 probability
    doubt_RX: Tensor | None = None  # float: entropy, or minus the margin, where ``select`` asks for it
    known_logps_RMK: Tensor | None = None  # float: level 1's log-probs of the known tokens, likewise


@dataclass(frozen=True, slots=True)
class Root:
    """Where a round starts: the newest emitted token, and what the extend pass offers after it (X = 1)."""

    tokens_R: Tensor  # int64
    offers: Offers


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One batched forward of the drafter: ``num_level0`` rows of level 0, then the rows of level 1.

    A level-0 row sees the level-0 rows of its node's true ancestors and itself. A level-1 row also sees its node's own
    level-0 row (unless ``see_own_level0`` is off). Nobody else sees a level-1 row. Padding rows hold tokens, rows and
    depths that are safe to compute.
    """

    tokens_RX: Tensor  # int64: the node's token (at level 1 the self-query stands in for it)
    feature_rows_RX: Tensor  # int64: the row whose feature feeds this one; at level 1 the node's own level-0 row
    depths_RX: Tensor  # int64: the node's depth, the root's is 0
    visible_RXY: Tensor  # bool, these rows included
    valid_RX: Tensor  # bool: False marks padding, where a request has fewer candidates than others may have
    num_level0: int
    known_tokens_RMK: Tensor | None = None  # int64: level 0's offers at level 1's nodes, where merging asks
