#!/usr/bin/env python3
"""The prompts that the shipped drafters' training data answers: a fixed draw from pools, for `secondguess prepare`.

    python scripts/training_prompts.py POOLS [--known ANSWERS.jsonl ...] --out prompts.jsonl

POOLS is a folder of JSONL files with `id` and `turns`. Each pool gives up to its count below, ids that `--known` files
lack first, in an order that a hash of the id fixes. An eighth of the single turns get a second one, from a list of
follow-ups, and a twelfth go without the chat template's own system prompt; a suffix of the id says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COUNTS = {
    "math_gsm8k_train": 3200,
    "math_svamp": 250,
    "code_gpteacher_codegen": 2600,
    "code_mbpp_train": 338,
    "code_python_puzzles": 232,
    "code_thealgorithms_titles": 600,
    "code_exercism": 135,
    "code_30s_javascript": 300,
    "code_tldr_shell": 200,
    "chat_open_assistant": 421,
    "chat_arena_hard": 647,
    "chat_llms_from_scratch": 700,
    "chat_self_instruct_seed": 171,
    "chat_self_instruct_user": 247,
    "chat_gpteacher_roleplay": 900,
    "chat_awesome_prompts": 148,
    "chat_clinc150": 200,
    "chat_chatterbot": 150,
    "context_t0": 300,
    "context_pubmedqa": 200,
    "qa_triviaqa": 400,
    "tool_glaive": 217,
    "tool_bfcl": 200,
    "translation_tldr_de": 80,
}
FOLLOW_UPS = (
    "Explain that in more detail.",
    "Give me an example.",
    "Say that again in one sentence.",
    "Why?",
    "Rewrite your answer as a list.",
    "Is there another way to do it?",
    "Check your answer step by step.",
    "Now make it shorter.",
    "What could go wrong with this?",
    "Explain it to a child.",
    "Can you write it more formally?",
    "Summarise the main points.",
    "What should I do next?",
    "Now do the same with a different example.",
    "Are you sure? Explain your reasoning.",
    "Rewrite it so that it is more fun to read.",
    "What are the advantages and disadvantages?",
    "Add comments that explain each step.",
    "How would you test this?",
    "Turn your answer into a short story.",
)


def draw(*words: str) -> float:
    """A number in [0, 1) that the words fix."""
    return int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:7]) / 2**56


def prompt(row: dict[str, Any]) -> dict[str, Any]:
    """The row as it is, with a second turn, or without a system prompt."""
    id_, turns, chance = row["id"], row["turns"], draw("form", row["id"])
    if len(turns) == 1 and chance < 1 / 8:
        follow_up = FOLLOW_UPS[int(draw("follow-up", id_) * len(FOLLOW_UPS))]
        return {"id": f"{id_}+follow-up", "turns": [*turns, follow_up]}
    if len(turns) == 1 and chance >= 11 / 12:
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": turns[0]}]
        return {"id": f"{id_}+no-system", "messages": messages}
    return {"id": id_, "turns": turns}


def pool_id(id_: str) -> str:
    """Of an answer's id: without the number of its turn and what ``prompt`` adds."""
    return re.sub(r"(\+follow-up|\+no-system)?(#\d+)?$", "", id_)


def prompts(pools: Path, known: set[str]) -> Iterator[dict[str, Any]]:
    for name, count in COUNTS.items():
        rows = [json.loads(line) for line in (pools / f"{name}.jsonl").open(encoding="utf-8")]
        rows.sort(key=lambda row: (row["id"] in known, draw("order", row["id"])))
        yield from (prompt(row) for row in rows[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pools", type=Path)
    parser.add_argument("--known", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = [line for path in args.known for line in path.open(encoding="utf-8")]
    known = {pool_id(json.loads(line)["id"]) for line in lines}
    chosen = sorted(prompts(args.pools, known), key=lambda row: draw("shuffle", row["id"]))
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8")
    print(f"{len(chosen)} conversations in {args.out}")


if __name__ == "__main__":
    main()
