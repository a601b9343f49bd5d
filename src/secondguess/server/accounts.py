"""What an answer cost, and how it was drafted for: ``usage`` and ``metrics`` of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secondguess.llm import LLM
from secondguess.types import Drafting, Output, Request, Speculation


def usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def num_cached_tokens(outputs: Sequence[Output], num_choices: int) -> int:
    """Tokens of the prompts whose K/V were there already, counted like ``num_prompt_tokens``."""
    return sum(output.stats.num_reused for output in outputs[::num_choices])


def num_prompt_tokens(requests: Sequence[Request], num_choices: int) -> int:
    """Each prompt counts once, however many answers it has."""
    return sum(len(request.prompt_ids) for request in requests[::num_choices])


def metrics(llm: LLM, requests: Sequence[Request], outputs: Sequence[Output]) -> dict[str, Any]:
    """The seed that repeats the answers, and vLLM's per-request metrics, which several answers have none of."""
    one = speculative_decoding(outputs[0].drafting, budget(llm, requests[0].speculation)) if len(outputs) == 1 else None
    return {"seed": outputs[0].seed, "speculative_decoding": one}


def budget(llm: LLM, wish: Speculation) -> int:
    """Draft tokens per cycle, at most; 0 without speculation."""
    method = llm.methods[wish.method or llm.method.name]
    return (wish.budget or method.tree.max_budget) if "budget" in method.uses else 0


def speculative_decoding(d: Drafting, num_spec_tokens: int) -> dict[str, Any]:
    """vLLM's shape (its docs/features/speculative_decoding/acceptance_metrics.md), and ``by_level``.

    Of a tree, all its nodes are draft tokens, so the acceptance rate looks small; the acceptance length is what counts.
    """
    by_length: dict[str, list[int]] = {}
    total = [0] * (num_spec_tokens + 1)
    for (drafted, accepted), count in sorted(d.cycles.items()):
        if drafted:
            by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += count
            total[accepted] += count
    return {
        "mean_acceptance_length": d.acceptance_length,
        "draft_acceptance_rate": d.num_accepted / max(d.num_drafted, 1),
        "acceptance_histogram": total,
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": d.num_drafts,
        "num_accepted_draft_tokens": d.num_accepted,
        "num_draft_tokens": d.num_drafted,
        "num_spec_tokens": num_spec_tokens,
        "by_level": {
            "0": level(d.num_drafted - d.num_drafted_refined, d.num_accepted - d.num_accepted_refined),
            "1": level(d.num_drafted_refined, d.num_accepted_refined),
        },
    }


def level(num_drafted: int, num_accepted: int) -> dict[str, int]:
    return {"num_draft_tokens": num_drafted, "num_accepted_draft_tokens": num_accepted}
