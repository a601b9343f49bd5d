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
from secondguess.kernels.linear import CompactLinear
from secondguess.target.linear import PackedLinear

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
    """The products with packed weights that are computed meanwhile, in order: of layers in compiled code, which
    multiply inside, and of single ones.
    """
    found: list[Product] = []

    def run_layers(layers: Sequence[compiled.CompiledLayer], x_RNH: Tensor, *args: Any, **kwargs: Any) -> None:
        num_rows = x_RNH.shape[:-1].numel()
        linears = [linear for layer in layers for linear in layer.kept[: len(compiled.PRODUCTS)]]
        found.extend(Product(linear, num_rows, linear.shape[1]) for linear in linears)  # type: ignore[attr-defined,arg-type]
        compiled.run_layers(layers, x_RNH, *args, **kwargs)

    def forward_of(kind: type[nn.Module]) -> Callable[[nn.Module, Tensor], Tensor]:
        forward = kind.forward

        def heard(self: nn.Module, x: Tensor) -> Tensor:
            found.append(Product(self, x.shape[:-1].numel(), x.shape[-1]))
            return forward(self, x)

        return heard

    with ExitStack() as stack:
        for module in LAYERS_RUN_BY:
            stack.enter_context(patch(f"{module}.run_layers", run_layers))
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
