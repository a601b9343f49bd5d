#!/usr/bin/env python3
"""Tokens per second and latency of a server under load, with speculation and without, in one process.

    scripts/throughput.py OUT.json [--at-once 1,4,16] [--rounds 7] [--arms plain,served] [-- FLAG OF serve ...]

Every request says how it wants to be drafted for (``extra_body``), so all arms have the same server, models and
batches: ``plain`` has speculation off, ``served`` says nothing and gets what the server finds fastest, any other arm
is a method. Rounds alternate the order of the arms. All answers are greedy and of one length, and have to be plain
decoding's to the letter. Shown are medians over rounds and their 95 % intervals; a speedup is within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import comb
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from openai import AsyncOpenAI
from serving import server

from secondguess.commands.record import make_record, write_json

FLAGS_OF = ("serve", "smollm2-135m")  # the command that further flags are for, and what it needs
SAYS: dict[str, dict[str, Any]] = {"plain": {"speculation": False}, "served": {}}
NUMBERS = ("tokens_per_second", "first_token_ms", "token_ms", "request_s", "tau")
HEADS = ("at once", "arm", "tokens/s", "first token, ms", "ms a token", "request, s", "tau", "speedup")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of one request."""

    text: str
    num_tokens: int
    first_s: float
    whole_s: float
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A measurement. Latencies are medians over its requests; tau is 1 where nothing was drafted."""

    round: int
    at_once: int
    arm: str
    tokens_per_second: float  # of all requests together, prefill and waiting included
    first_token_ms: float
    token_ms: float  # after the first
    request_s: float
    tau: float


class Load:
    """Users of a server, each with one request at a time."""

    def __init__(self, url: str, model: str, questions: Sequence[str], max_tokens: int, num_requests: int) -> None:
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self.model, self.questions = model, questions
        self.max_tokens, self.num_requests = max_tokens, num_requests
        self.texts: dict[str, str] = {}  # plain decoding's, by question

    async def cell(self, round_: int, at_once: int, arm: str) -> Cell:
        """Raises SystemExit if an answer is not plain decoding's."""
        each = max(1, self.num_requests // at_once)
        started = perf_counter()
        users = [self.user(arm, [user + at_once * i for i in range(each)]) for user in range(at_once)]
        answers = [answer for done in await asyncio.gather(*users) for answer in done]
        seconds = perf_counter() - started
        drafts = sum(a.num_drafts for a in answers)
        return Cell(
            round=round_,
            at_once=at_once,
            arm=arm,
            tokens_per_second=sum(a.num_tokens for a in answers) / seconds,
            first_token_ms=1e3 * median(a.first_s for a in answers),
            token_ms=1e3 * median((a.whole_s - a.first_s) / max(a.num_tokens - 1, 1) for a in answers),
            request_s=median(a.whole_s for a in answers),
            tau=1 + sum(a.num_accepted for a in answers) / max(drafts, 1),
        )

    async def user(self, arm: str, numbers: Sequence[int]) -> list[Answer]:
        found = []
        for number in numbers:
            question = self.questions[number % len(self.questions)]
            found.append(await self.ask(question, SAYS.get(arm, {"speculation": {"method": arm}})))
            if self.texts.setdefault(question, found[-1].text) != found[-1].text:
                raise SystemExit(f"{arm} did not write plain decoding's answer to {question!r}")
        return found

    async def ask(self, question: str, wish: dict[str, Any]) -> Answer:
        started, first, text, last = perf_counter(), 0.0, "", None
        stream = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=self.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **wish},
        )
        async for last in stream:
            piece = last.choices[0].delta.content if last.choices else None
            if piece and not first:
                first = perf_counter() - started
            text += piece or ""
        whole = perf_counter() - started
        assert last is not None, "a stream has parts"
        drafting = last.model_extra["metrics"]["speculative_decoding"]
        counts = drafting["num_spec_steps"], drafting["num_accepted_draft_tokens"]
        return Answer(text, last.usage.completion_tokens, first, whole, *counts)


async def measure(load: Load, args: argparse.Namespace, write: Callable[[list[Cell]], None]) -> list[Cell]:
    """All cells, after a round that does not count: there plain decoding is first, and the server learns what pays."""
    cells: list[Cell] = []
    for round_ in range(args.rounds + 1):
        arms = args.arms if round_ % 2 == 0 else args.arms[::-1]
        for at_once in args.at_once:
            for arm in arms:
                cell = await load.cell(round_, at_once, arm)
                speed = f"{cell.tokens_per_second:7.1f} tokens/s"
                print(f"round {round_}: {at_once:>3} at once, {arm:<9} {speed}", flush=True)
                cells += [cell] * (round_ > 0)
        write(cells)
    return cells


def summary(cells: Sequence[Cell], arms: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each load and arm: medians over rounds, each with its interval."""
    rows = []
    for at_once in sorted({cell.at_once for cell in cells}):
        for arm in arms:
            ours, plain = ([c for c in cells if (c.at_once, c.arm) == (at_once, name)] for name in (arm, arms[0]))
            row: dict[str, Any] = {"at_once": at_once, "arm": arm, "rounds": len(ours)}
            row |= {name: with_interval([getattr(c, name) for c in ours]) for name in NUMBERS}
            ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, plain, strict=True)]
            rows.append(row | {"speedup": with_interval(ratios)})
    return rows


def with_interval(values: Sequence[float]) -> list[float]:
    """The median, and the two values, equally far from the ends by order, that enclose it with 95 % probability.

    Of fewer than six values, the lowest and the highest: then it is less.
    """
    ordered, n = sorted(values), len(values)
    outside = accumulate(2 * comb(n, i) / 2**n for i in range(n // 2))  # if i values are left out at each end
    drop = max(sum(share <= 0.05 for share in outside) - 1, 0)
    return [median(ordered), ordered[drop], ordered[n - 1 - drop]]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---:|---|" + "---:|" * (len(HEADS) - 2)]
    for row in rows:
        digits = {"tokens_per_second": 1, "first_token_ms": 0, "token_ms": 1, "request_s": 2, "tau": 2, "speedup": 2}
        cells = [f"{row[name][0]:.{d}f} [{row[name][1]:.{d}f}, {row[name][2]:.{d}f}]" for name, d in digits.items()]
        lines.append(f"| {row['at_once']} | {row['arm']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, end = parser.add_argument, argv.index("--") if "--" in argv else len(argv)
    add("out", type=Path, metavar="OUT.json", help="the server's log goes beside it")
    add("--target", default="smollm2-135m")
    add("--at-once", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16], metavar="INT,...")
    add("--arms", type=lambda text: text.split(","), default=["plain", "served"], metavar="NAME,...")
    add("--rounds", type=int, default=7)
    add("--requests", type=int, default=8, help="of a measurement, at the least; one for each user if those are more")
    add("--max-tokens", type=int, default=64)
    args = parser.parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    if args.arms[0] != "plain":
        parser.error("--arms has to begin with plain, which the others are compared with")
    return args


def main(argv: Sequence[str]) -> int:
    args, record = parse(argv), make_record() | {"command": shlex.join(sys.argv)}
    known = json.loads(Path(__file__).with_name("regimes.json").read_text(encoding="utf-8"))["questions"]
    questions = [question for pair in zip(known["English"], known["Python"], strict=True) for question in pair]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Arms ask the same questions: the second would find them read, if its method has the first one's K/V.
    flags = ["--max-batch-size", str(max(args.at_once)), "--no-enable-prefix-caching", *args.flags]

    def write(cells: Sequence[Cell]) -> None:
        more = {"server": flags, "summary": summary(cells, args.arms)} if cells else {}
        write_json(args.out, record, "rows", [asdict(cell) for cell in cells], **more)

    with server(args.target, flags, args.out.with_suffix(".log")) as served:
        load = Load(served.url, args.target, questions, args.max_tokens, args.requests)
        cells = asyncio.run(measure(load, args, write))
    print(table(summary(cells, args.arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
