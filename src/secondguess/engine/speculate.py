"""What the engine asks of a speculator, and the one that never speculates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from secondguess.device import upload
from secondguess.engine.sampler_state import GREEDY_BELOW
from secondguess.tree.guide import Plan
from secondguess.types import DraftTree, Speculation, Verdict


@dataclass(frozen=True, slots=True)
class Draw:
    """How a request's tokens are drawn from the target's law: what fixes their noise, and how much it weighs."""

    temperature: float
    seed: int
    choice: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


GREEDY = Draw(0.0, 0)


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the R requests of a cycle stand. Host lists beside tensors, so that nobody waits for the device."""

    slots: tuple[int, ...]
    tokens: tuple[int, ...]  # newest emitted token of each request, the root of its tree
    histories: tuple[list[int], ...]  # prompt and emitted tokens, the root included; not to be changed
    draws: tuple[Draw, ...]
    device: torch.device | str = "cpu"  # where the target runs, so where the tree has to be


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a pass added to a request: its newest tokens, and the target's states that stand before each."""

    slot: int
    tokens: Tensor  # int64 [E]: accepted draft tokens and the bonus token; parts of a prompt: prompt[1:] + first token
    taps_ELH: Tensor  # taps of the position before each of these tokens


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the beginning of a text has been read already."""

    slot: int
    count: int  # tokens; the one after them is the same, too


class Speculator(Protocol):
    """Drafts trees. It may keep a K/V cache of its own, with the engine's slot numbers."""

    def keeps(self, slot: int, speculation: Speculation, count: int) -> int:
        """How many of the first ``count`` tokens in ``slot`` a request can take over that wants to be drafted for so.

        They are there until another request begins in that slot, or it is released.
        """
        ...

    def admit(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        """A request comes to ``slot``, and begins with what ``keeps`` told of, in the same slot or another."""
        ...

    def draft(self, roots: Roots) -> DraftTree:
        """A tree per request, over ``roots.tokens``, on ``roots.device``."""
        ...

    def accept(self, accepted: list[Accepted]) -> None:
        """Hear what was emitted since the last draft. A slot that is new, or was released, starts from nothing."""
        ...

    def release(self, slot: int) -> None:
        """Nobody needs what ``slot`` holds."""
        ...

    def steps_for(self, slot: int) -> int:
        """Forwards that the newest draft for a request took, the extend pass included."""
        ...

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """Hear what came of the newest draft, and how long its cycle took."""
        ...


class Policy(Protocol):
    """Decides how the next draft is made."""

    def plan(self, draws: Sequence[Draw], context: float) -> Plan | None:
        """For the requests of a cycle, which have ``context`` tokens on average. None: they are not drafted for."""
        ...

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """As ``Speculator.learn``; the tree is one of lone roots where nothing was drafted."""
        ...


class Plain:
    """No speculation: a tree of roots alone. Plain decoding is the same cycle with this speculator."""

    def keeps(self, slot: int, speculation: Speculation, count: int) -> int:
        return count

    def admit(self, slot: int, speculation: Speculation, prefix: Prefix | None) -> None:
        pass

    def draft(self, roots: Roots) -> DraftTree:
        tokens_R1 = upload(roots.tokens, roots.device)[:, None]
        zeros_R1 = torch.zeros_like(tokens_R1)
        return DraftTree(tokens_R1, zeros_R1 - 1, zeros_R1, zeros_R1, zeros_R1.float(), zeros_R1 == 0, deepest=0)

    def accept(self, accepted: list[Accepted]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def steps_for(self, slot: int) -> int:
        return 0

    def learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        pass
