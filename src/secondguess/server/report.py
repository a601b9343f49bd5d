"""A line in the log every ten seconds while there is something to say, in vLLM's words."""

from __future__ import annotations

import asyncio
import logging

from secondguess.llm import LLM
from secondguess.server.metrics import accepted_at
from secondguess.types import Drafting, Totals

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def report_forever(llm: LLM, interval_s: float = INTERVAL_S) -> None:
    before = llm.totals
    while True:
        await asyncio.sleep(interval_s)
        now = llm.totals
        if lines := report(llm, before, now, interval_s):
            log.info("%s", "; ".join(lines))
        before = now


def report(llm: LLM, before: Totals, now: Totals, seconds: float) -> list[str]:
    """What happened in between; nothing if nothing did and nobody waits."""
    load, done = llm.load, now - before
    prompts, tokens, drafting = done.num_prompt_tokens, done.num_tokens, done.drafting
    if not (prompts or tokens or load.num_running or load.num_waiting):
        return []
    engine = (
        f"Avg prompt throughput: {prompts / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {tokens / seconds:.1f} tokens/s, "
        f"Running: {load.num_running} reqs, Waiting: {load.num_waiting} reqs, KV cache usage: {load.cache_used:.1%}, "
        f"Prefix cache hit rate: {done.num_reused_tokens / max(prompts, 1):.1%}"
    )
    if done.num_preemptions:
        engine += f", Preempted: {done.num_preemptions} reqs"
    return [engine, of_drafting(drafting, seconds)] if drafting.num_drafts else [engine]


def of_drafting(d: Drafting, seconds: float) -> str:
    positions = ", ".join(f"{count / d.num_drafts:.3f}" for count in accepted_at(d))
    return (
        f"SpecDecoding metrics: Mean acceptance length: {d.acceptance_length:.2f}, "
        f"Accepted throughput: {d.num_accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {d.num_drafted / seconds:.2f} tokens/s, "
        f"Accepted: {d.num_accepted} tokens ({d.num_accepted_refined} refined), Drafted: {d.num_drafted} tokens, "
        f"Per-position acceptance rate: {positions}, "
        f"Avg Draft acceptance rate: {d.num_accepted / d.num_drafted:.1%}"
    )
