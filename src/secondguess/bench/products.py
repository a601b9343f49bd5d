"""The matrix products of a cycle alone: which there are, and how long they take with nothing done in between.

R requests, N rows of each, W columns that they see, A query heads, G K/V heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from secondguess.kernels import decoder as compiled
from secondguess.kernels.draft import CompiledRound
from secondguess.kernels.linear import CompactLinear
from secondguess.kernels.structs import PRODUCTS
from secondguess.target.linear import PackedLinear
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import Rows

LAYERS_RUN_BY = ("secondguess.target.native", "secondguess.drafter.native")
PACKED = (CompactLinear, PackedLinear)


@dataclass(frozen=True, slots=True)
class Product:
    """``x [num_rows, num_inputs]`` times the weights of ``layer``."""

    layer: nn.Module
    num_rows: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries times keys and probabilities times values, of one layer of compiled code."""

    num_requests: int
    num_rows: int
    width: int
    sizes: Mapping[str, int]  # A, G, D

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [RG, N A/G, D], k transposed [RG, D, W], v [RG, W, D]; random."""
        per, groups, d = self.sizes["A"] // self.sizes["G"], self.num_requests * self.sizes["G"], self.sizes["D"]
        k, v = torch.randn(2, groups, self.width, d)
        return torch.randn(groups, self.num_rows * per, d), k.transpose(1, 2), v


@contextmanager
def recorded() -> Generator[list[Product | Attention]]:
    """The products that are computed meanwhile, in order: with packed weights, of compiled code, which multiplies
    inside, and single ones; and those of compiled attention.
    """
    found: list[Product | Attention] = []
    root_offers, forward = CompiledRound.root_offers, CompiledRound.forward

    def count(linear: CompactLinear, num_rows: int) -> None:
        found.append(Product(linear, num_rows, linear.shape[1]))

    def count_layers(layers: Sequence[compiled.CompiledLayer], num_requests: int, num_rows: int, width: int) -> None:
        for layer in layers:
            for linear in layer.kept[: len(PRODUCTS)]:
                assert isinstance(linear, CompactLinear)
                count(linear, num_requests * num_rows)
            found.append(Attention(num_requests, num_rows, width, layer.sizes))

    def run_layers(
        layers: Sequence[compiled.CompiledLayer], x_RNH: Tensor, turn: Any, rows: Rows, *args: Any, **kwargs: Any
    ) -> None:
        count_layers(layers, *rows.visible_RNW.shape)
        compiled.run_layers(layers, x_RNH, turn, rows, *args, **kwargs)

    def of_roots(self: CompiledRound, width: int) -> Offers:
        count(self.drafter.head, self.struct.R)
        return root_offers(self, width)

    def of_rows(self: CompiledRound, rows: DraftRows, width: int) -> Offers:
        num_requests, num_rows = rows.tokens_RX.shape
        if self.drafter.lens is not None and num_rows > rows.num_level0:
            count(self.drafter.lens, num_requests * (num_rows - rows.num_level0))
        num_seen = self.struct.length - 1 + rows.visible_RXY.shape[2]
        count_layers(self.drafter.layers, num_requests, num_rows, num_seen)
        count(self.drafter.head, num_requests * num_rows)
        return forward(self, rows, width)

    def forward_of(kind: type[nn.Module]) -> Callable[[nn.Module, Tensor], Tensor]:
        forward = kind.forward

        def heard(self: nn.Module, x: Tensor) -> Tensor:
            found.append(Product(self, x.shape[:-1].numel(), x.shape[-1]))
            return forward(self, x)

        return heard

    with ExitStack() as stack:
        for module in LAYERS_RUN_BY:
            stack.enter_context(patch(f"{module}.run_layers", run_layers))
        stack.enter_context(patch.object(CompiledRound, "root_offers", of_roots))
        stack.enter_context(patch.object(CompiledRound, "forward", of_rows))
        for kind in PACKED:
            stack.enter_context(patch.object(kind, "forward", forward_of(kind)))
        yield found


class Alone:
    """Products over random rows, one after the other."""

    def __init__(self, products: Sequence[Product | Attention]) -> None:
        weighted = [p for p in products if isinstance(p, Product)]
        inputs = {shape: torch.randn(shape) for shape in {(p.num_rows, p.num_inputs) for p in weighted}}
        self.calls = [(p.layer, inputs[p.num_rows, p.num_inputs]) for p in weighted]
        self.attentions = [p.operands() for p in products if isinstance(p, Attention)]

    def seconds(self) -> float:
        """Of all products with weights."""
        started = perf_counter()
        for layer, x in self.calls:
            layer(x)
        return perf_counter() - started

    def attention_seconds(self) -> float:
        """Of attention's, as PyTorch multiplies them, over all columns that are seen by some row."""
        started = perf_counter()
        for q, k, v in self.attentions:
            torch.bmm(torch.bmm(q, k), v)
        return perf_counter() - started
