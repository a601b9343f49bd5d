"""Run by ``test_spread`` under torchrun: a batch, decoded over a target in parts; then an error in one of the parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from secondguess import LLM, SamplingParams
from secondguess.engine.thread import run
from secondguess.target.hf import HFTarget
from secondguess.target.spread import load_spread

PROMPTS = ["ab", "cde fgh", "cde fgh", "i", "jk lmn", "opq"]  # the one that comes twice is read once
METHODS = ("pr:budget=12", "pr:budget=auto")


def decode(target: HFTarget, drafter: Path, method: str) -> list[list[int]]:
    """Tokens of six requests, of which three run at a time and each is sampled with settings of its own."""
    llm = LLM(target, drafter if method != "ar" else None, method=method, max_batch_size=3, max_model_len=64)
    params = [
        SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=6 + 3 * i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [list(output.token_ids) for output in llm.generate(PROMPTS, params)]


def main(folder: Path, out: Path) -> None:
    target, drafter = run(load_spread, str(folder / "target"), "float64"), folder / "drafters" / "pr"
    out.write_text(json.dumps({method: decode(target, drafter, method) for method in METHODS}))

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise MemoryError("no room for this pass")

    target._pass = fail  # of this process alone, which has told the others already
    decode(target, drafter, "ar")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
