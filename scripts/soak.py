"""Long and unruly use of a server: requests of all kinds, a third of them cancelled; nothing may leak or get stuck.

The last part of the time nobody cancels, and what the server counts has to be what the clients got, to the token.

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
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import linear_regression, pvariance
from typing import Any

import httpx
from serving import resident_mib

from secondguess.commands.record import make_record, write_json

Fields = dict[str, Any]

TOPICS = ("the sea", "a bicycle", "rain", "prime numbers", "bread", "a lighthouse", "friction", "the moon")
WAYS = (None, False, {"method": "ngram"}, {"method": "eagle3.1"}, {"method": "pr", "budget": 2})
LIMITS: tuple[Fields, ...] = ({}, {}, {"stop": [" the", "\n\n"]}, {"stop": "e", "min_tokens": 1})
PENALTIES: tuple[Fields, ...] = (
    {},
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.1},
)
RULED = {"structured_outputs": {"regex": "(yes|no), [a-z ]{5,60}"}}
CANCELLED = 1 / 3  # share of the requests
COUNTED = 1 / 5  # share of the time in which none is
# What the server counts, and where an answer tells its share.
SUMS = {
    "generation_tokens_total": ("usage", "completion_tokens"),
    "spec_decode_num_drafts_total": ("drafting", "num_spec_steps"),
    "spec_decode_num_draft_tokens_total": ("drafting", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens_total": ("drafting", "num_accepted_draft_tokens"),
}
ENDS = ("stop", "length"), ("abort",), ("error",)  # reasons that the server gives
REST_S = 20.0  # in which a server that nobody asks anything has to come to rest
GROWTH_MIB_PER_HOUR = 60.0  # memory that may be gained


@dataclass(frozen=True, slots=True)
class Users:
    """What they do."""

    cancel: bool
    rule: bool  # ask for grammars


def question(rng: random.Random, users: Users) -> tuple[str, Fields]:
    """A route, and a body for it."""
    text, is_chat = f"Tell me about {rng.choice(TOPICS)}, {rng.randrange(1000)}.", rng.random() < 0.5
    body: Fields = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    body |= {"max_tokens": rng.randrange(1, 128), "temperature": rng.choice([0, 0.7, 1.0])}
    body |= {"speculation": rng.choice(WAYS), **rng.choice(LIMITS), **rng.choice(PENALTIES)}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3, "echo": True}
    if users.rule and rng.random() < 0.2 and "min_tokens" not in body:
        body |= RULED
    if users.cancel and rng.random() < 0.2:
        body["n"] = 3  # of several answers together no drafting is told
    if rng.random() < 0.6 and "echo" not in body:
        body |= {"stream": True, "stream_options": {"include_usage": True, "drafting": rng.random() < 0.2}}
    return "/v1/chat/completions" if is_chat else "/v1/completions", body


async def one(client: httpx.AsyncClient, rng: random.Random, users: Users, counts: Counter[str]) -> None:
    """A request that is read to its end, or left after a while. Whatever goes wrong is counted by its name."""
    path, body = question(rng, users)
    leave = users.cancel and rng.random() < CANCELLED
    counts["asked"] += body.get("n", 1)
    try:
        if "stream" in body:
            last = await streamed(client, path, body, rng.randrange(1, 30) if leave else None)
        else:
            last = await whole(client, path, body, rng.uniform(0.01, 1.0) if leave else None)
    except (httpx.HTTPError, Fault) as error:
        counts[f"error {type(error).__name__} {error}".strip()] += 1
        return
    counts["cancelled" if last is None else "finished"] += body.get("n", 1)
    if last:
        told = {"usage": last["usage"], "drafting": last["metrics"]["speculative_decoding"] or {}}
        for name, (part, field) in SUMS.items():
            counts[name] += told[part].get(field, 0)


class Fault(Exception):
    """An answer that is none."""


async def streamed(client: httpx.AsyncClient, path: str, body: Fields, leave_after: int | None) -> Fields | None:
    """The last event; None if it was left after so many lines."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise Fault(f"status {response.status_code}")
        last, number, done = {}, 0, False
        async for line in response.aiter_lines():
            number += bool(line)
            if number == leave_after:
                return None
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    raise Fault("in a stream")
    if not done:
        raise Fault("cut off")
    return last


async def whole(client: httpx.AsyncClient, path: str, body: Fields, leave_after_s: float | None) -> Fields | None:
    """The answer; None if it was not waited for."""
    try:
        async with asyncio.timeout(leave_after_s):
            response = await client.post(path, json=body)
    except TimeoutError:
        return None
    if response.status_code != 200:
        raise Fault(f"status {response.status_code}")
    return response.json()


async def user(client: httpx.AsyncClient, seed: int, end: float, users: Users, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        await one(client, rng, users, counts)


async def has_grammars(client: httpx.AsyncClient) -> bool:
    return (await client.post("/v1/completions", json={"prompt": "a", **RULED})).status_code == 200


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


async def phase(client: httpx.AsyncClient, args: argparse.Namespace, seconds: float, users: Users) -> Fields:
    """What the clients counted, and what the server did, of which nothing is under way before or after."""
    before, counts, end = await at_rest(client), Counter[str](), time.monotonic() + seconds
    await asyncio.gather(*(user(client, seed, end, users, counts) for seed in range(args.users)))
    after = await at_rest(client)
    left = {name: after[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
    grown = {name: value - before.get(name, 0) for name, value in after.items() if "_total" in name}
    return {"counts": dict(counts), "server": grown, "left": left}


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """What happened."""
    seconds, started = 60 * args.minutes, time.monotonic()
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        rule = await has_grammars(client)
        memory = asyncio.create_task(watch_memory(args.pid, started + seconds, seconds / 120))
        unruly = await phase(client, args, seconds * (1 - COUNTED), Users(cancel=True, rule=rule))
        counted = await phase(client, args, seconds * COUNTED, Users(cancel=False, rule=rule))
        sizes = await memory
    about = {"minutes": (time.monotonic() - started) / 60, "users": args.users, "grammars": rule}
    return about | {"unruly": unruly, "counted": counted, "memory_mib": [round(size, 1) for size in sizes]}


def complaints(found: Fields) -> list[str]:
    """What went wrong."""
    wrong = faults(found["unruly"]) + faults(found["counted"])
    counts, (ended, dropped, failed) = Counter(found["unruly"]["counts"]), ends(found["unruly"])
    # A cancelled one may have ended just before the server heard of it, or never have begun.
    if not (counts["finished"] <= ended and ended + dropped <= counts["asked"] and not failed):
        told = f"{ended:g} ended, {dropped:g} dropped and {failed:g} failed"
        wrong.append(f"the server counts {told}, we {counts['finished']} of {counts['asked']}")
    ours, theirs = Counter(found["counted"]["counts"]), Counter(found["counted"]["server"])
    (ended, dropped, failed) = ends(found["counted"])
    if (ended, dropped, failed) != (ours["finished"], 0, 0):
        wrong.append(f"nobody left, but the server counts {ended:g} ended and {dropped + failed:g} not")
    wrong += [f"{name} is {theirs[name]:g}, and we got {ours[name]}" for name in SUMS if theirs[name] != ours[name]]
    return wrong + memory_complaints(found["memory_mib"], found["minutes"])


def faults(part: Fields) -> list[str]:
    wrong = [f"{name}: {count}" for name, count in part["counts"].items() if name.startswith("error ")]
    return wrong + [f"{name} is {value:g} after the end" for name, value in part["left"].items() if value]


def ends(part: Fields) -> list[float]:
    """How many answers the server counts by the way in which they ended."""
    return [sum(part["server"].get(f"request_success_total {reason}", 0) for reason in reasons) for reasons in ENDS]


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
    sizes = found["memory_mib"]
    lines = [f"{found['minutes']:.1f} minutes, {found['users']} users"]
    lines += [f"{name}: {found[name]['counts']}" for name in ("unruly", "counted")]
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
