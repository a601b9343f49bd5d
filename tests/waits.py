"""What would be amiss on a GPU, found on the CPU: waiting for the device, tensors that nobody sent there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ASKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "equal")
FACTORIES = (
    torch.arange, torch.empty, torch.eye, torch.full, torch.ones, torch.rand, torch.randn, torch.tensor, torch.zeros,
)  # fmt: skip
SIZED_BY_VALUES = ("aten.nonzero", "aten.masked_select", "aten.unique", "aten.repeat_interleave.Tensor")


def place() -> str:
    """Where in the package we are."""
    ours = [f for f in traceback.extract_stack() if "/secondguess/" in f.filename]
    return f"{ours[-1].filename.rsplit('/secondguess/')[-1]}:{ours[-1].lineno}" if ours else "outside"


class Waits(TorchFunctionMode):
    """Notes where the host asks a tensor for its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ASKS:
            self.places.append(place())
        return func(*args, **(kwargs or {}))


class SizedByValues(TorchDispatchMode):
    """Notes operations whose result has a size that only the device knows: on a GPU they wait, too."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = str(func).startswith(("aten.index.", "aten.index_put")) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or str(func).startswith(SIZED_BY_VALUES):
            self.places.append(f"{func} in {place()}")
        return func(*args, **(kwargs or {}))


class Homeless(TorchFunctionMode):
    """Notes tensors that are made without a device, that is on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES and (kwargs or {}).get("device") is None:
            self.places.append(place())
        return func(*args, **(kwargs or {}))


class Traced:
    """Stands in for ``graphs.Graph``: operations are recorded once, and the host's numbers as they were then.

    Like a CUDA graph it cannot record what asks a tensor for its numbers, and what it returns is overwritten later.
    """

    made = 0

    def __init__(self, work: Callable[..., tuple[Tensor, ...]], args: Sequence[Tensor], pool: Any) -> None:
        Traced.made += 1
        with torch.inference_mode(False), torch.no_grad():
            self.args = [x.clone() for x in args]
            self.graph = make_fx(work)(*self.args)
            self.results = tuple(x.clone() for x in self.graph(*self.args))

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            for mine, given in zip(self.args, args, strict=True):
                mine.copy_(given)
            for result, new in zip(self.results, self.graph(*self.args), strict=True):
                result.copy_(new)
        return self.results
