"""Long and unruly use of a server: streams of all kinds, a third of which are cancelled; nothing may leak or get stuck.

scripts/soak.py http://127.0.0.1:8000 --minutes 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from typing import Any

import httpx

TOPICS = ("the sea", "a bicycle", "rain", "prime numbers", "bread", "a lighthouse", "friction", "the moon")
WAYS = (None, False, {"method": "ngram"}, {"method": "eagle3.1"}, {"method": "pr", "budget": 2})
WARM_UP_S = 30.0  # before memory is first looked at


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
    leave_after = rng.randrange(1, 30) if rng.random() < 0.33 else None
    async with client.stream("POST", "/v1/chat/completions", json=body(rng)) as response:
        if response.status_code != 200:
            counts[f"status {response.status_code}"] += 1
            return
        usage, number = None, 0
        async for line in response.aiter_lines():
            number += bool(line)
            if number == leave_after:
                counts["cancelled"] += 1
                return
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                counts["errors in streams"] += "error" in event
                usage = event.get("usage") or usage
    counts["finished"] += 1
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


async def watch_memory(pid: int | None, end: float) -> list[float]:
    """MiB of the server, every ten seconds; nothing if its process is not known."""
    sizes = []
    await asyncio.sleep(WARM_UP_S)
    while pid and time.monotonic() < end:
        with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
            sizes.append(int(re.findall(r"VmRSS:\s+(\d+)", file.read())[0]) / 1024)
        await asyncio.sleep(10)
    return sizes


async def soak(args: argparse.Namespace) -> list[str]:
    """What went wrong."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * args.minutes
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        before = await scrape(client)
        memory = asyncio.create_task(watch_memory(args.pid, end))
        await asyncio.gather(*(user(client, seed, end, counts) for seed in range(args.users)))
        await asyncio.sleep(1)
        after, sizes = await scrape(client), await memory
    print(dict(counts))
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    ended = sum(grown.get(f"request_success_total {reason}", 0) for reason in ("stop", "length"))
    complaints = [name for name in counts if name.startswith("status ") or (name.startswith("errors") and counts[name])]
    if after["num_requests_running"] or after["num_requests_waiting"]:
        complaints.append("requests are stuck")
    # A cancelled one may have ended just before the server heard of it.
    if not counts["finished"] <= ended <= counts["finished"] + counts["cancelled"]:
        complaints.append(f"{ended:g} requests ended by the server's count, {counts['finished']} by ours")
    if grown["generation_tokens_total"] < counts["tokens"]:
        complaints.append("the server counts fewer tokens than it sent")
    if sizes:
        print(f"memory: {sizes[0]:.0f} MiB at first, {max(sizes):.0f} at most, {sizes[-1]:.0f} at last")
        if sizes[-1] > 1.1 * sizes[0] + 50:
            complaints.append("memory grows")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--users", type=int, default=8, help="at once (default: 8)")
    parser.add_argument("--pid", type=int, help="of the server, whose memory is then watched")
    complaints = asyncio.run(soak(parser.parse_args()))
    print("\n".join(complaints) or "all well")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
