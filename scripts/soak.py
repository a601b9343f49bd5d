"""Long and unruly use of a server: streams of all kinds, a third of which are cancelled; nothing may leak or get stuck.

scripts/soak.py http://127.0.0.1:8000 [--pid PID] [--minutes 20] [--users 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import sys
import time
from collections import Counter
from math import sqrt
from pathlib import Path
from statistics import linear_regression, pvariance
from typing import Any

import httpx
from serving import resident_mib

from secondguess.commands.record import make_record, write_json

TOPICS = ("the sea", "a bicycle", "rain", "prime numbers", "bread", "a lighthouse", "friction", "the moon")
WAYS = (None, False, {"method": "ngram"}, {"method": "eagle3.1"}, {"method": "pr", "budget": 2})
CANCELLED = 1 / 3  # share of the streams
ENDS = ("stop", "length"), ("abort",)  # reasons that the server gives
REST_S = 20.0  # in which a server that nobody asks anything has to come to rest
GROWTH_MIB_PER_HOUR = 60.0  # memory that may be gained


def body(rng: random.Random) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Tell me about {rng.choice(TOPICS)}, {rng.randrange(1000)}."}],
        "max_tokens": rng.randrange(1, 128),
        "temperature": rng.choice([0, 0.7, 1.0]),
        "speculation": rng.choice(WAYS),
        "stream": True,
        "stream_options": {"include_usage": True, "drafting": rng.random() < 0.2},
    }


async def one(client: httpx.AsyncClient, rng: random.Random, counts: Counter[str]) -> None:
    """A request that is read to its end, or left after a while."""
    leave_after = rng.randrange(1, 30) if rng.random() < CANCELLED else None
    async with client.stream("POST", "/v1/chat/completions", json=body(rng)) as response:
        if response.status_code != 200:
            counts[f"status {response.status_code}"] += 1
            return
        usage, number, done = None, 0, False
        async for line in response.aiter_lines():
            number += bool(line)
            if number == leave_after:
                counts["cancelled"] += 1
                return
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                counts["errors in streams"] += "error" in event
                usage = event.get("usage") or usage
    counts["finished" if done else "cut off"] += 1
    counts["tokens"] += usage["completion_tokens"] if usage else 0


async def user(client: httpx.AsyncClient, seed: int, end: float, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        await one(client, rng, counts)


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """Metrics by name, summed over their labels but the reason of an end."""
    found: Counter[str] = Counter()
    for line in (await client.get("/metrics")).text.splitlines():
        if match := re.fullmatch(r"secondguess:(\w+)(?:\{(.*)\})? (\S+)", line):
            reason = re.findall(r'finished_reason="(\w+)"', match[2] or "")
            found[" ".join([match[1], *reason])] += float(match[3])
    return found


async def at_rest(client: httpx.AsyncClient) -> dict[str, float]:
    """The metrics once nothing runs or waits; as they are if that takes too long."""
    end = time.monotonic() + REST_S
    while (found := await scrape(client))["num_requests_running"] or found["num_requests_waiting"]:
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.2)
    return found


async def watch_memory(pid: int | None, end: float, every_s: float) -> list[float]:
    """MiB of the server, as time goes by; nothing if its process is not known."""
    sizes = []
    while pid and time.monotonic() < end:
        await asyncio.sleep(every_s)
        sizes.append(resident_mib(pid))
    return sizes


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """What happened."""
    counts: Counter[str] = Counter()
    seconds, started = 60 * args.minutes, time.monotonic()
    end = started + seconds
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        before = await at_rest(client)
        memory = asyncio.create_task(watch_memory(args.pid, end, seconds / 120))
        await asyncio.gather(*(user(client, seed, end, counts) for seed in range(args.users)))
        after, sizes = await at_rest(client), await memory
    return {
        "minutes": (time.monotonic() - started) / 60,
        "users": args.users,
        "counts": dict(counts),
        "server": {name: value - before.get(name, 0) for name, value in after.items() if "_total" in name},
        "left": {name: after[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")},
        "memory_mib": [round(size, 1) for size in sizes],
    }


def complaints(found: dict[str, Any]) -> list[str]:
    """What went wrong."""
    counts, grown = Counter(found["counts"]), Counter(found["server"])
    wrong = [f"{name}: {counts[name]}" for name in counts if is_fault(name) and counts[name]]
    wrong += [f"{name} is {value:g} after the end" for name, value in found["left"].items() if value]
    ended, dropped = (sum(grown[f"request_success_total {reason}"] for reason in reasons) for reasons in ENDS)
    sent = counts["finished"] + counts["cancelled"]
    # A cancelled one may have ended just before the server heard of it; then it is none that it dropped.
    if not (counts["finished"] <= ended and ended + dropped == sent):
        wrong.append(f"the server counts {ended:g} ended and {dropped:g} dropped, we {counts['finished']} of {sent}")
    if grown["generation_tokens_total"] < counts["tokens"]:
        wrong.append("the server counts fewer tokens than it sent")
    return wrong + memory_complaints(found["memory_mib"], found["minutes"])


def is_fault(name: str) -> bool:
    return name.startswith(("status ", "errors ", "cut off"))


def memory_complaints(sizes: list[float], minutes: float) -> list[str]:
    """Memory is flat if, after the first quarter, its trend may well be none: the lower limit of 95 % counts."""
    settled = sizes[len(sizes) // 4 :]
    if len(settled) < 6:
        return []
    places = range(len(settled))
    slope, start = linear_regression(places, settled)
    misses = sum((size - start - slope * place) ** 2 for place, size in zip(places, settled, strict=True))
    doubt = 2 * sqrt(misses / (len(settled) - 2) / (len(settled) * pvariance(places)))
    hourly = (slope - doubt) * len(sizes) / minutes * 60
    if hourly > GROWTH_MIB_PER_HOUR:
        return [f"memory grows by {hourly:.0f} MiB an hour or more, from {settled[0]:.0f} to {settled[-1]:.0f} MiB"]
    return []


def verdict(found: dict[str, Any]) -> str:
    counts, sizes = found["counts"], found["memory_mib"]
    lines = [f"{found['minutes']:.1f} minutes, {found['users']} users: {counts}"]
    if sizes:
        lines.append(f"memory: {sizes[0]:.0f} MiB at first, {max(sizes):.0f} at most, {sizes[-1]:.0f} at last")
    wrong = found["complaints"]
    return "\n".join([*lines, "FAILED: " + "; ".join(wrong) if wrong else "all well: nothing leaked, nothing is stuck"])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--users", type=int, default=8, help="at once (default: 8)")
    parser.add_argument("--pid", type=int, help="of the server, whose memory is then watched")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found = asyncio.run(soak(args))
    found["complaints"] = complaints(found)
    print(verdict(found))
    if args.json:
        write_json(args.json, make_record() | {"command": shlex.join(sys.argv)}, "rows", [found])
    return 1 if found["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
