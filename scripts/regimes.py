#!/usr/bin/env python3
"""tau by prompt length, chat template, system prompt and language, decoded live and greedily.

The prompts are our own, and stay what they are: regimes.json beside this file, and for the long ones windows of
regimes.txt, which is a copy of this repository's pages as they once were. Every tau has its 95 % interval, from drawing
prompts anew; with eight of them it is rather too narrow than too wide.

    scripts/regimes.py OUT.json [LENGTH ...] [--minutes 60]

Every answer is kept in OUT.jsonl as soon as it is there: when the time is up, or after a kill, the same command goes
on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kept import Kept, TimeIsUp

from secondguess import LLM, SamplingParams
from secondguess.bench.acceptance import estimate, gain_of, named, tau_of
from secondguess.bench.metrics import is_looping
from secondguess.commands.record import make_record, write_json
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import weights_digest
from secondguess.drafter.shipped import find_drafter
from secondguess.types import Output, Request, Speculation

WORDING, TEXT = (Path(__file__).with_suffix(suffix) for suffix in (".json", ".txt"))
PLAIN, *DRAFTED = METHODS = ("ar", "eagle3.1", "pr")
BUDGET, MAX_TOKENS = 24, 96
LENGTHS = (128, 512, 2048, 4096, 8000)
WINDOWS = 8  # prompts of each length, if the text has so many that share no word
Ids = tuple[int, ...]


def chat(llm: LLM, question: str, system: str | None = None) -> Ids:
    first = [{"role": "system", "content": system}] if system else []
    return llm.encode([*first, {"role": "user", "content": question}])


def by_wording(llm: LLM) -> Iterator[tuple[str, list[Ids]]]:
    known = json.loads(WORDING.read_text(encoding="utf-8"))
    english = known["questions"]["English"]
    yield "no chat template", [llm.encode(question) for question in english]
    for name, template in known["templates"].items():
        yield f"chat template: {name}", [llm.encode(template.replace("{question}", q)) for q in english]
    for name, system in known["systems"].items():
        yield f"system prompt: {name}", [chat(llm, question, system) for question in english]
    for language, questions in known["questions"].items():
        yield language, [chat(llm, question) for question in questions]


def by_length(llm: LLM, lengths: Sequence[int]) -> Iterator[tuple[str, list[Ids]]]:
    text = llm.encode(TEXT.read_text(encoding="utf-8"))
    for length in lengths:
        count = min(WINDOWS, len(text) // length)
        starts = [i * (len(text) // count) for i in range(count)]
        windows = [llm.decode(text[start : start + length]) for start in starts]
        yield f"length {length}", [chat(llm, f"{window}\n\nWhat is this text about?") for window in windows]


def decode(llm: LLM, ids: Ids, method: str) -> dict[str, Any]:
    """An answer's tokens, and the cycles and accepted draft tokens that it took."""
    params = SamplingParams(max_tokens=MAX_TOKENS)

    async def last_output() -> Output | None:
        deltas = [d async for d in llm.answer(Request(ids, params, speculation=Speculation(method)))]
        return deltas[-1].output

    output = asyncio.run(last_output())
    assert output is not None, "the last delta brings the output"
    stats = output.stats
    return {"token_ids": list(output.token_ids), "cycles": stats.num_cycles, "accepted": stats.num_accepted}


def answers(llm: LLM, kept: Kept, prompts: Sequence[Ids]) -> dict[str, list[dict[str, Any]]]:
    """By method, one for each prompt. Raises TimeIsUp."""
    settings = {"target": llm.target.fingerprint, "budget": BUDGET, "max_tokens": MAX_TOKENS}
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for ids in prompts:
        for method in METHODS:
            drafter = None if method == PLAIN else weights_digest(find_drafter(None, method, llm.target.embedding))
            made_of = settings | {"method": method, "drafter": drafter, "prompt": ids}
            found[method].append(kept(made_of, partial(decode, llm, ids, method)))
    return found


def row(regime: str, prompts: Sequence[Ids], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """``tau_METHOD`` is over prompts whose plain text does not loop (None if all do), ``tau_all_METHOD`` over all;
    ``gain_pr`` is how much larger PR's is than EAGLE-3.1's. Each with its interval (``_low``, ``_high``).
    """
    plain = [answer["token_ids"] for answer in found[PLAIN]]
    fresh = [not is_looping(tokens) for tokens in plain]
    tables_P2 = {method: tokens_and_cycles(found[method]) for method in DRAFTED}
    both_P4 = np.hstack([tables_P2["pr"], tables_P2["eagle3.1"]])
    what: dict[str, Any] = {
        "regime": regime,
        "prompt_tokens": [len(ids) for ids in prompts],
        "tokens": sum(map(len, plain)),
        "looping": len(prompts) - sum(fresh),
    }
    for which, chosen in (("", fresh), ("all_", [True] * len(plain))):
        for method, table_P2 in tables_P2.items():
            what |= named(f"tau_{which}{method}", estimate(table_P2[chosen], tau_of))
        what |= named(f"gain_{which}pr", estimate(both_P4[chosen], gain_of))
    for method in DRAFTED:
        same = zip(found[method], plain, strict=True)
        what[f"identical_{method}"] = sum(answer["token_ids"] == tokens for answer, tokens in same)
    return what


def tokens_and_cycles(found: Sequence[dict[str, Any]]) -> np.ndarray:
    """float64 [P, 2], by prompt."""
    return np.array([(answer["accepted"] + answer["cycles"], answer["cycles"]) for answer in found], np.float64)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tau by prompt length, template, system prompt and language")
    parser.add_argument("out", type=Path, help="the table, as JSON; answers are kept beside it")
    parser.add_argument("lengths", type=int, nargs="*", default=LENGTHS, help="of the long prompts, in tokens")
    parser.add_argument("--minutes", type=float, default=60, help="begin no answer after so long (default: 60)")
    parser.add_argument("--target", default="smollm2-135m", help="for which both drafters ship")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    tree = TreeConfig(budget=BUDGET)
    llm = LLM(args.target, method="pr", others=(PLAIN, "eagle3.1"), tree=tree, max_batch_size=1)
    record, rows = make_record() | {"command": shlex.join(sys.argv)}, list[dict[str, Any]]()
    kept = Kept(args.out.with_suffix(".jsonl"), args.minutes, record["revision"])
    try:
        for regime, prompts in (*by_wording(llm), *by_length(llm, args.lengths)):
            rows.append(row(regime, prompts, answers(llm, kept, prompts)))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
            write_json(args.out, record, "rows", rows, revisions=sorted(kept.revisions))
    except TimeIsUp as stop:
        sys.stdout.write(f"{stop}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
