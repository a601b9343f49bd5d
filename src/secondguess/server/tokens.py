"""Text and conversations to token ids, and back. It takes time, so it runs outside the event loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prompts import Chat, Prompt
from secondguess.server.errors import ApiError, refusal
from secondguess.server.protocol import Message, TokenizeBody


def tokenized(llm: LLM, body: TokenizeBody) -> tuple[tuple[int, ...], list[str] | None]:
    """Token ids, and the text of each if it is wanted. Raises ApiError."""
    ids = text_ids(llm, body) if body.messages is None else chat_ids(llm, body, body.messages)
    return ids, [llm.decode([token]) for token in ids] if body.return_token_strs else None


def text_ids(llm: LLM, body: TokenizeBody) -> tuple[int, ...]:
    if body.prompt is None:
        raise ApiError(400, "give either prompt or messages", "prompt")
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} goes with messages, and a prompt has no use for it", name)
    return encoded(llm, body.prompt, "prompt")


def chat_ids(llm: LLM, body: TokenizeBody, messages: Sequence[Message]) -> tuple[int, ...]:
    if body.prompt is not None:
        raise ApiError(400, "give either prompt or messages", "prompt")
    return encoded(llm, conversation(messages, body.tools, body.chat_template_kwargs), "messages")


def detokenized(llm: LLM, tokens: Sequence[int]) -> str:
    """Raises ApiError."""
    size = llm.target.spec.vocab_size
    if any(token >= size for token in tokens):
        raise ApiError(400, f"a token is outside the vocabulary of {size}", "tokens", "invalid_value")
    if len(tokens) > llm.max_model_len:
        raise too_long(llm, f"there are {len(tokens)} tokens", "tokens")
    return llm.decode(tokens)


def conversation(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, variables: dict[str, Any] | None
) -> Chat:
    return Chat([as_message(message) for message in messages], tools or (), variables or {})


def as_message(message: Message) -> dict[str, Any]:
    """What a chat template expects: text in one piece, arguments of calls as objects."""
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    for call in fields.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = arguments(function["arguments"])
    return fields


def arguments(given: str) -> Any:
    """Of a tool call."""
    try:
        return json.loads(given)
    except ValueError as error:
        raise ApiError(400, f"the arguments of a tool call are no JSON: {error}", "messages") from error
    except RecursionError as error:
        raise ApiError(400, "the arguments of a tool call are nested too deep", "messages") from error


def encoded(llm: LLM, prompt: Prompt, param: str) -> tuple[int, ...]:
    """Token ids. Raises ApiError, for a text that can never fit before it is tokenized."""
    if llm.target.tokenizer and (size := num_characters(prompt)) > llm.max_characters:
        raise too_long(llm, f"the text has {size} characters", param)
    try:
        return llm.encode(prompt)
    except UserError as error:
        raise refusal(error, param) from error


def num_characters(prompt: Prompt) -> int:
    """Of what clients wrote; token ids have none."""
    if isinstance(prompt, Chat):
        return sum(len(message.get("content") or "") for message in prompt.messages)
    return len(prompt) if isinstance(prompt, str) else 0


def too_long(llm: LLM, what: str, param: str) -> ApiError:
    room = f"prompt and answer together have room for {llm.max_model_len} tokens"
    return ApiError(400, f"{what}, but {room}", param, "context_length_exceeded")
