"""A file with every cycle's draft tree: one JSON line per request and cycle."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from secondguess.bench.plan import Prompt
from secondguess.engine.cycle import CycleTrace
from secondguess.errors import UserError, did_you_mean
from secondguess.methods import Method
from secondguess.types import DraftTree, Verdict


@dataclass(frozen=True, slots=True)
class Line:
    """One cycle of one text. Lists from ``tokens`` to ``pieces`` have an entry per node, the root first."""

    task: str
    id: str
    method: str
    budget: int
    temperature: float
    cycle: int  # from 1
    root: int  # index of the root's token in prompt and answer
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    levels: list[int]
    scores: list[float]
    pieces: list[str]  # the tokens as text
    path: list[int]  # accepted nodes, the root first
    emitted: list[int]  # tokens: the accepted ones, then the bonus token
    emitted_pieces: list[str]


class Tracer:
    """Writes what it hears of the replay of ``prompts``, of which every one has its own index."""

    def __init__(
        self, file: TextIO, prompts: Sequence[Prompt], temperature: float, decode: Callable[[int], str]
    ) -> None:
        self._file, self._prompts, self._temperature, self._decode = file, prompts, temperature, decode
        self._emitted: Counter[tuple[Method, int]] = Counter()
        self._cycles: Counter[tuple[Method, int]] = Counter()

    def listen(self, method: Method, texts: Sequence[int], trace: CycleTrace) -> None:
        for row, i in enumerate(texts):
            self._cycles[method, i] += 1
            line = self._line(method, i, trace, row)
            self._emitted[method, i] += len(line.emitted)
            self._file.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")

    def num_cycles(self, method: Method) -> int:
        return sum(n for (other, _), n in self._cycles.items() if other == method)

    def _line(self, method: Method, i: int, trace: CycleTrace, row: int) -> Line:
        tree, verdict, prompt = trace.tree, trace.verdict, self._prompts[i]
        n, e = int(tree.valid_RN[row].sum()), int(verdict.num_emitted_R[row])
        tokens, emitted = tree.tokens_RN[row, :n].tolist(), verdict.tokens_RD[row, :e].tolist()
        return Line(
            task=prompt.task,
            id=prompt.id,
            method=method.typed,
            budget=method.tree.max_budget,
            temperature=self._temperature,
            cycle=self._cycles[method, i],
            root=len(prompt.ids) + self._emitted[method, i],
            tokens=tokens,
            parents=tree.parents_RN[row, :n].tolist(),
            depths=tree.depths_RN[row, :n].tolist(),
            levels=tree.levels_RN[row, :n].tolist(),
            scores=tree.scores_RN[row, :n].tolist(),
            pieces=[self._decode(token) for token in tokens],
            path=verdict.path_RD[row, :e].tolist(),
            emitted=emitted,
            emitted_pieces=[self._decode(token) for token in emitted],
        )


def trace_of(line: Line) -> CycleTrace:
    """The cycle as a batch of one."""
    scores_RN = torch.tensor([line.scores])
    tree = DraftTree(
        tokens_RN=torch.tensor([line.tokens]),
        parents_RN=torch.tensor([line.parents]),
        depths_RN=torch.tensor([line.depths]),
        levels_RN=torch.tensor([line.levels]),
        scores_RN=scores_RN,
        valid_RN=torch.ones_like(scores_RN, dtype=torch.bool),
    )
    path_RD, emitted_RD = torch.tensor([line.path]), torch.tensor([line.emitted])
    return CycleTrace(tree, Verdict(path_RD, emitted_RD, torch.tensor([len(line.path)])))


def find(path: Path, prompt_id: str, cycle: int) -> list[Line]:
    """The lines of one cycle of one text: of every method, budget and temperature in the file.

    Raises UserError when the file is none of ``Tracer``, or there is no such text or cycle.
    """
    cycles: dict[str, int] = {}
    found = []
    for line in read(path):
        cycles[line.id] = max(line.cycle, cycles.get(line.id, 0))
        if (line.id, line.cycle) == (prompt_id, cycle):
            found.append(line)
    if prompt_id not in cycles:
        raise UserError(f"{path} has no prompt {prompt_id!r}{did_you_mean(prompt_id, cycles)}")
    if not found:
        raise UserError(f"{path} has cycles 1 to {cycles[prompt_id]} of {prompt_id!r}, not {cycle}")
    return found


def read(path: Path) -> Iterator[Line]:
    if not path.is_file():
        raise UserError(f"no trace {path}: make one with 'secondguess trace'")
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                yield Line(**json.loads(text))
            except (ValueError, TypeError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not a line of a trace: make one with 'secondguess trace'") from error
