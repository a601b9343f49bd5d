"""A draft tree grown in compiled code, the paper's way: the tree of ``tree.grow``, whose letters these are, too.

R requests, C candidates and Y rows that there is room for, X rows of a forward, K offers of a row, P waiting nodes,
N nodes of the final tree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondguess.config import Reconsider, TreeConfig
from secondguess.kernels.build import BuildError, library
from secondguess.kernels.structs import CANDIDATES, RowsStruct, TableStruct, address
from secondguess.tree.candidates import Candidates
from secondguess.tree.grow import grow
from secondguess.tree.guide import Fixed, Guide
from secondguess.tree.rows import DraftRows, Offers, Root
from secondguess.types import DraftTree

Grow = Callable[[TreeConfig, Root, Callable[[DraftRows], Offers], Guide | None], DraftTree]


@dataclass(frozen=True, slots=True)
class Laid:
    """Rows of a forward as the compiled code keeps them."""

    struct: RowsStruct
    nodes_RX: Tensor  # bound until the rows are absorbed
    rows: DraftRows


class Table:
    """All that a draft has offered, and who waits for a second look."""

    def __init__(self, config: TreeConfig, root: Root) -> None:
        """Raises BuildError where the code cannot be compiled."""
        self.lib, self.config, self.last_offers = library(), config, config.offer_width
        num_requests, offers = len(root.tokens_R), root.offers
        self.room = 1 + (config.num_steps - 1) * config.rows_per_step
        num_candidates, waiting = 1 + self.room * config.offer_width, config.grow_width + config.extra_advance
        self.candidates = {
            name: torch.empty(num_requests, num_candidates, dtype=dtype) for name, dtype in CANDIDATES.items()
        }
        self.others = {
            "lineage": torch.empty(num_requests, self.room, self.room, dtype=torch.bool),
            "own": torch.empty(num_requests, self.room, dtype=torch.int64),
            "waiting": torch.empty(num_requests, waiting, dtype=torch.int64),
            "waiting_rows": torch.empty(num_requests, waiting, dtype=torch.int64),
            "confidence": torch.empty(num_requests, waiting),
            "waiting_valid": torch.empty(num_requests, waiting, dtype=torch.bool),
            "left": torch.empty(num_requests, dtype=torch.int64),
            "places": torch.empty(num_candidates, dtype=torch.int64),
        }
        pointers = {name: tensor.data_ptr() for name, tensor in (self.candidates | self.others).items()}
        sizes = {"R": num_requests, "C": num_candidates, "Y": self.room, "K": config.offer_width, "P": waiting}
        self.struct = TableStruct(**sizes, **pointers)
        tokens_R, read = root.tokens_R.contiguous(), contiguous(offers)
        roots, look = address(tokens_R, torch.int64), config.reconsider
        most_looks = look.reconsider_cap or config.num_steps * config.num_reconsider
        pointers = (roots, *addresses(*read))
        self.lib.grow_plant(ctypes.byref(self.struct), *pointers, look.root_eligible, most_looks)

    def pool(self) -> Candidates:
        """What there is so far."""
        count = 1 + self.struct.num_rows * self.struct.K
        return Candidates(*(table_RC[:, :count] for table_RC in self.candidates.values()))

    def lay(self, step: int) -> Laid:
        """The rows of the forward in ``step``, from 1 on."""
        config, look = self.config, self.config.reconsider
        extra = min(config.extra_advance, self.struct.num_waiting)
        num_level0 = min(config.grow_width, self.last_offers) + extra
        again = config.num_reconsider if look.reconsider_steps is None or step <= look.reconsider_steps else 0
        num_level1 = min(again, self.struct.num_waiting, int(self.others["left"].max()))
        r, x = self.struct.R, num_level0 + num_level1
        numbers_4RX = torch.empty(4, r, x, dtype=torch.int64)
        visible_RXY = torch.empty(r, x, self.struct.num_rows + x, dtype=torch.bool)
        valid_RX = torch.empty(r, x, dtype=torch.bool)
        nodes_RX, tokens_RX, feature_rows_RX, depths_RX = numbers_4RX
        numbers = (address(numbers_RX, torch.int64) for numbers_RX in numbers_4RX)
        pointers = (*numbers, address(visible_RXY, torch.bool), address(valid_RX, torch.bool))
        struct = RowsStruct(num_level0, extra, num_level1, *pointers)
        from_level0 = look.child_feature == "level0"
        self.lib.grow_lay(*by_reference(self.struct, struct), look.threshold, from_level0, look.see_own_level0)
        rows = DraftRows(tokens_RX, feature_rows_RX, depths_RX, visible_RXY, valid_RX, num_level0)
        return Laid(struct, nodes_RX, rows)

    def absorb(self, laid: Laid, offers: Offers) -> None:
        """Add what the forward over ``laid`` offers. Level 1 goes first: it may raise the scores level 0 builds on."""
        refined = self.config.reconsider.refined_offer_width or self.config.offer_width
        read = contiguous(replace(offers, logps_RXK=offers.logps_RXK.clone()))
        self.lib.grow_absorb(*by_reference(self.struct, laid.struct), *addresses(*read), refined)
        self.last_offers = offers.tokens_RXK[0].numel()

    def cut(self, budgets: list[int]) -> DraftTree:
        """The tree that goes to verification; trees are padded to the largest budget."""
        r, n = self.struct.R, 1 + max(budgets)
        numbers_4RN, scores_RN = torch.empty(4, r, n, dtype=torch.int64), torch.empty(r, n)
        valid_RN, sizes = torch.empty(r, n, dtype=torch.bool), (ctypes.c_int64 * r)(*budgets)
        numbers = (address(numbers_RN, torch.int64) for numbers_RN in numbers_4RN)
        out = (*numbers, address(scores_RN), address(valid_RN, torch.bool))
        self.lib.grow_cut(ctypes.byref(self.struct), sizes, n, *out)
        tokens_RN, parents_RN, depths_RN, levels_RN = numbers_4RN
        deepest = self.config.num_steps
        return DraftTree(tokens_RN, parents_RN, depths_RN, levels_RN, scores_RN, valid_RN, deepest=deepest)


def grow_compiled(
    config: TreeConfig, root: Root, forward: Callable[[DraftRows], Offers], guide: Guide | None = None
) -> DraftTree:
    """``tree.grow.grow`` for what ``takes`` says, on the CPU in float32; its tree bit for bit."""
    guide, table = guide or Fixed(config.max_budget), Table(config, root)
    for step in range(1, config.num_steps):
        if not guide.goes_on(table.pool()):
            break
        laid = table.lay(step)
        table.absorb(laid, forward(laid.rows))
    return table.cut(guide.budgets(table.pool()))


def grower(config: TreeConfig, device: torch.device) -> Grow:
    """What grows trees of this shape on a device."""
    try:
        return grow_compiled if takes(config) and device.type == "cpu" and library() else grow
    except BuildError:
        return grow


def takes(config: TreeConfig) -> bool:
    """Whether the compiled code has the rules of ``config``: all of the paper's, and what changes none of them."""
    rules = ("merge", "select", "pool", "propagate")
    return all(getattr(config.reconsider, name) == getattr(Reconsider(), name) for name in rules)


def contiguous(offers: Offers) -> tuple[Tensor, Tensor, Tensor]:
    return offers.tokens_RXK.contiguous(), offers.logps_RXK.contiguous(), offers.confidence_RX.contiguous()


def addresses(tokens_RXK: Tensor, logps_RXK: Tensor, confidence_RX: Tensor) -> tuple[int | None, ...]:
    return address(tokens_RXK, torch.int64), address(logps_RXK), address(confidence_RX)


def by_reference(*structs: ctypes.Structure) -> Iterable[object]:
    return map(ctypes.byref, structs)
