"""From the bodies of requests to what the engine is asked. Tokenizes, so it runs outside the event loop."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prompts import Prompt
from secondguess.server.errors import ApiError, refusal
from secondguess.server.protocol import AnyBody, ChatBody, CompletionBody, Sampled, SpeculationChoice
from secondguess.server.structure import chat_grammar, grammar
from secondguess.server.tokens import conversation, encoded, too_long
from secondguess.types import Request, SamplingParams, Speculation

SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
)
COMPLETION_TOKENS = 16  # the OpenAI API's default where there is no chat
MAX_STOPS, MAX_STOP_LENGTH = 16, 512  # the OpenAI API takes 4


def completion_requests(llm: LLM, body: CompletionBody) -> list[Request]:
    """``n`` requests for each prompt, in the order of the answer's choices. Raises ApiError."""
    of_prompt = body.logprobs if body.echo else None
    if of_prompt is not None and body.stream:
        raise ApiError(
            400, "logprobs of an echoed prompt do not stream: leave out stream, echo or logprobs", "logprobs"
        )
    body, rules, requests = seeded(body), grammar(llm, body), []
    num_answers: Counter[tuple[int, ...]] = Counter()  # of each prompt so far: one that is given twice gets others
    for prompt in as_prompts(body.prompt):
        ids = fitting(llm, prompt, "prompt")
        max_tokens = body.max_tokens or min(COMPLETION_TOKENS, llm.max_model_len - len(ids))
        params = sampling(llm, body, ids, max_tokens, body.logprobs)
        params = replace(params, prompt_logprobs=of_prompt)
        text = prompt if isinstance(prompt, str) else None
        requests += choices(llm, body, Request(ids, params, num_answers[ids], text=text, grammar=rules))
        num_answers[ids] += body.num_choices
    return requests


def chat_requests(llm: LLM, body: ChatBody) -> list[Request]:
    """``n`` requests. Raises ApiError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    given = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, given):
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    body, tools = seeded(body), body.tools if body.tool_choice != "none" else None
    ids = fitting(llm, conversation(body.messages, tools, body.chat_template_kwargs), "messages")
    params = sampling(llm, body, ids, given, (body.top_logprobs or 0) if body.logprobs else None)
    return choices(llm, body, Request(ids, params, grammar=chat_grammar(llm, body)))


def as_prompts(given: str | Sequence[Any]) -> list[Prompt]:
    """One or several, as the API lets clients write it."""
    if len(given) == 0:
        raise ApiError(400, "prompt is empty: give text or token ids", "prompt", "invalid_value")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def fitting(llm: LLM, prompt: Prompt, param: str) -> tuple[int, ...]:
    """The prompt's tokens, if they leave room for an answer."""
    ids = encoded(llm, prompt, param)
    if len(ids) >= llm.max_model_len:
        raise too_long(llm, f"the prompt has {len(ids)} tokens", param)
    return ids


def sampling(
    llm: LLM, body: Sampled, ids: Sequence[int], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """As asked for; without a limit, up to the end of the context."""
    room = llm.max_model_len - len(ids)
    if max_tokens is not None and max_tokens > room:
        name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        raise too_long(llm, f"the prompt has {len(ids)} tokens and {max_tokens} more are asked for", name)
    given: dict[str, Any] = {"temperature": 1.0}
    given |= {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    try:
        return SamplingParams(
            **given,
            top_k=max(body.top_k or 0, 0),
            max_tokens=room if max_tokens is None else max_tokens,
            stop=stops(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=biases(body.logit_bias or {}),
            logprobs=logprobs,
        )
    except UserError as error:
        raise refusal(error) from error


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """They are looked for after every token, while all others wait."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > MAX_STOPS:
        raise ApiError(400, f"{len(found)} stop strings: give {MAX_STOPS} at most", "stop", "invalid_value")
    if any(len(stop) > MAX_STOP_LENGTH for stop in found):
        raise ApiError(400, f"a stop string may have {MAX_STOP_LENGTH} characters at most", "stop", "invalid_value")
    return found


def biases(given: dict[str, float]) -> dict[int, float]:
    """By token id; JSON has only strings for keys."""
    for token in given:
        if not token.isdecimal():
            raise ApiError(
                400, f"logit_bias has the key {token!r}, which is no token id", "logit_bias", "invalid_value"
            )
    return {int(token): bias for token, bias in given.items()}


def seeded(body: AnyBody) -> AnyBody:
    """All answers have one seed. Drawn ones have 32 bits: clients that read numbers as floats may send them back."""
    seed = secrets.randbits(32) if body.seed is None else body.seed % 2**63
    return body.model_copy(update={"seed": seed})


def choices(llm: LLM, body: Sampled, request: Request) -> list[Request]:
    """``n`` answers, with noise of their own; ``request`` is the first."""
    traced = bool(body.stream_options and body.stream_options.drafting)
    asked = replace(request, speculation=speculation(llm, body), traced=traced)
    return [replace(asked, choice=request.choice + i) for i in range(body.num_choices)]


def speculation(llm: LLM, body: Sampled) -> Speculation:
    wish = Speculation()
    if body.speculation is False:
        wish = Speculation("ar")
    elif isinstance(body.speculation, SpeculationChoice):
        wish = Speculation(body.speculation.method, body.speculation.budget)
    try:
        llm.check(wish)
    except UserError as error:
        raise refusal(error, "speculation") from error
    return wish
