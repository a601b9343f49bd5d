"""The matrix products of a cycle alone: which there are, and how long they take with nothing done in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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
from secondguess.target.linear import PackedLinear
from secondguess.tree.rows import DraftRows, Offers

LAYERS_RUN_BY = ("secondguess.target.native", "secondguess.drafter.native")
PACKED = (CompactLinear, PackedLinear)


@dataclass(frozen=True, slots=True)
class Product:
    """``x [num_rows, num_inputs]`` times the weights of ``layer``."""

    layer: nn.Module
    num_rows: int
    num_inputs: int


@contextmanager
def recorded() -> Generator[list[Product]]:
    """The products with packed weights that are computed meanwhile, in order: of compiled code, which multiplies
    inside, and of single ones.
    """
    found: list[Product] = []
    root_offers, forward = CompiledRound.root_offers, CompiledRound.forward

    def count(linear: CompactLinear, num_rows: int) -> None:
        found.append(Product(linear, num_rows, linear.shape[1]))

    def count_layers(layers: Sequence[compiled.CompiledLayer], num_rows: int) -> None:
        for layer in layers:
            for linear in layer.kept[: len(compiled.PRODUCTS)]:
                assert isinstance(linear, CompactLinear)
                count(linear, num_rows)

    def run_layers(layers: Sequence[compiled.CompiledLayer], x_RNH: Tensor, *args: Any, **kwargs: Any) -> None:
        count_layers(layers, x_RNH.shape[:-1].numel())
        compiled.run_layers(layers, x_RNH, *args, **kwargs)

    def of_roots(self: CompiledRound, width: int) -> Offers:
        count(self.drafter.head, self.struct.R)
        return root_offers(self, width)

    def of_rows(self: CompiledRound, rows: DraftRows, width: int) -> Offers:
        num_requests, num_rows = rows.tokens_RX.shape
        if self.drafter.lens is not None and num_rows > rows.num_level0:
            count(self.drafter.lens, num_requests * (num_rows - rows.num_level0))
        count_layers(self.drafter.layers, num_requests * num_rows)
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

    def __init__(self, products: Sequence[Product]) -> None:
        shapes = {(p.num_rows, p.num_inputs) for p in products}
        inputs = {shape: torch.randn(shape) for shape in shapes}
        self.calls = [(p.layer, inputs[p.num_rows, p.num_inputs]) for p in products]

    def seconds(self) -> float:
        started = perf_counter()
        for layer, x in self.calls:
            layer(x)
        return perf_counter() - started
