#!/usr/bin/env python3
"""tau by prompt length, chat template, system prompt and language, decoded live and greedily on the default target.

The prompts are our own: regimes.json beside this file, and for the long ones windows of this repository's pages.

    scripts/regimes.py OUT.json [LENGTH ...]
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from secondguess import LLM, SamplingParams
from secondguess.bench.metrics import is_looping
from secondguess.commands.record import make_record, write_json
from secondguess.config import TreeConfig
from secondguess.types import Output, Request, Speculation

ROOT = Path(__file__).parents[1]
METHODS = ("ar", "eagle3.1", "pr")
TREE = TreeConfig(budget=24)
PARAMS = SamplingParams(max_tokens=96)
LENGTHS = (128, 512, 2048, 4096, 8000)
WINDOWS = 2  # prompts of each length
Ids = tuple[int, ...]


def chat(llm: LLM, question: str, system: str | None = None) -> Ids:
    first = [{"role": "system", "content": system}] if system else []
    return llm.encode([*first, {"role": "user", "content": question}])


def by_length(llm: LLM, lengths: Sequence[int]) -> Iterator[tuple[str, list[Ids]]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = llm.encode("\n".join(page.read_text(encoding="utf-8") for page in pages))
    for length in lengths:
        step = (len(text) - length) // WINDOWS
        windows = [llm.decode(text[i * step : i * step + length]) for i in range(WINDOWS)]
        yield f"length {length}", [chat(llm, f"{window}\n\nWhat is this text about?") for window in windows]


def by_wording(llm: LLM) -> Iterator[tuple[str, list[Ids]]]:
    known = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    english = known["questions"]["English"]
    yield "no chat template", [llm.encode(question) for question in english]
    for name, system in known["systems"].items():
        yield f"system prompt: {name}", [chat(llm, question, system) for question in english]
    for language, questions in known["questions"].items():
        yield language, [chat(llm, question) for question in questions]


def decode(llm: LLM, ids: Ids, method: str) -> Output:
    async def last_output() -> Output | None:
        deltas = [d async for d in llm.answer(Request(ids, PARAMS, speculation=Speculation(method)))]
        return deltas[-1].output

    output = asyncio.run(last_output())
    assert output is not None, "the last delta brings the output"
    return output


def row(regime: str, outputs: dict[str, list[Output]]) -> dict[str, Any]:
    plain = outputs["ar"]
    found: dict[str, Any] = {
        "regime": regime,
        "prompt_tokens": [len(o.prompt_ids) for o in plain],
        "tokens": sum(len(o.token_ids) for o in plain),
        "looping": sum(is_looping(o.token_ids) for o in plain),
    }
    for method in METHODS[1:]:
        stats = [o.stats for o in outputs[method]]
        cycles = sum(s.num_cycles for s in stats)
        found[f"tau {method}"] = 1 + sum(s.num_accepted for s in stats) / cycles
        same = zip(outputs[method], plain, strict=True)
        found[f"identical {method}"] = sum(ours.token_ids == theirs.token_ids for ours, theirs in same)
    return found


def main(out: str, *lengths: str) -> None:
    llm = LLM(method="pr", others=METHODS[:2], tree=TREE, max_batch_size=1)
    rows, record = [], make_record() | {"command": shlex.join(sys.argv)}
    for regime, prompts in (*by_wording(llm), *by_length(llm, [*map(int, lengths)] or LENGTHS)):
        rows.append(row(regime, {method: [decode(llm, ids, method) for ids in prompts] for method in METHODS}))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
        write_json(Path(out), record, "rows", rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
