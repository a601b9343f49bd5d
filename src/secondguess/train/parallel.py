"""Several processes that train one drafter: started by torchrun, each on its share of every batch.

Losses are normalised by the rows of all of them, so the gradient of a step is a sum and their number changes nothing.

That is why gradients are added up here and not by torch's DistributedDataParallel. It takes means; it wants one
backward pass that reaches all weights, where ``shared_loss=level0`` takes two that reach some each; and what it is
good at, sending gradients while others are still computed, gains nothing for one layer: a step sends them once, after
all its batches, in one piece.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from secondguess.drafter.model import Drafter
from secondguess.errors import require

T = TypeVar("T")
PATIENCE = timedelta(hours=12)  # the others wait while the first one captures states


@dataclass(frozen=True, slots=True)
class Processes:
    """This process's number among ``count``. Alone, nothing is sent anywhere."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        return list(items[self.rank :: self.count])

    def even_share(self, items: Sequence[T], costs: Sequence[float]) -> list[T]:
        """Of items that do not cost the same: the dearest first, each to whoever has the least to do so far."""
        shares: list[list[int]] = [[] for _ in range(self.count)]
        loads = [0.0] * self.count
        for i in sorted(range(len(items)), key=lambda i: -costs[i]):
            idle = loads.index(min(loads))
            shares[idle].append(i)
            loads[idle] += costs[i]
        return [items[i] for i in sorted(shares[self.rank])]

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of their numbers."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def add(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Until all are here."""
        self.gather(None)


@contextmanager
def processes(device: torch.device) -> Generator[Processes]:
    """Those that torchrun started, else this one alone."""
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def parallelize(loss: nn.Module, parallel: str, device: torch.device) -> nn.Module:
    """``replicate`` leaves it as it is (see ``add_gradients``). ``shard`` is FSDP2: each process keeps a part of the
    weights, their gradients and the optimizer's state, and all of them only while it needs them. Needs torch 2.8.

    One unit for everything: pieces of the one layer are called, never the layer, so there is nowhere else to hook in.
    """
    if parallel == "replicate":
        return loss
    require(dist.is_initialized(), "parallel=shard needs several processes: start with torchrun")
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    sharded = fully_shard(loss, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)  # a sum, not a mean
    sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
    return loss  # changed in place


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The gradients of every process become the sum of all. Sharded ones are so already."""
    gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def whole(value: Any) -> Any:
    """Tensors, alone or in dicts and lists, with all their parts, on the CPU if they had been apart.

    All processes must call it.
    """
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    return [whole(inner) for inner in value] if isinstance(value, list) else value


def whole_drafter(drafter: Drafter) -> Drafter:
    """The drafter itself, or a copy with all the weights if this process keeps a part of them."""
    if not any(isinstance(p, DTensor) for p in drafter.parameters()):
        return drafter
    copy = Drafter(drafter.config, drafter.embedding, drafter.target_ids)
    copy.target_embedding = drafter.target_embedding  # of the target's, which an imported drafter may not embed by
    copy.tap_index = drafter.tap_index
    copy.load_state_dict(whole(drafter.state_dict()))
    return copy.to(drafter.embedding.device)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take over the state of an optimizer over whole weights; ``state`` is changed."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in state["state"].items():
        state["state"][i] = {name: part_of(value, parameters[i]) for name, value in values.items()}
    optimizer.load_state_dict(state)


def part_of(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """What belongs to this process's part of the parameter, which ``value`` has the shape of, if it is no counter."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    there = value.to(parameter.device)
    return distribute_tensor(there, parameter.device_mesh, parameter.placements, src_data_rank=None)
