"""Answers that have to follow a grammar: ``response_format``, and vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from secondguess.errors import UserError
from secondguess.grammar import CompiledGrammar
from secondguess.llm import LLM
from secondguess.server.errors import ApiError, refusal
from secondguess.server.protocol import ChatBody, Sampled


def chat_grammar(llm: LLM, body: ChatBody) -> CompiledGrammar | None:
    """What ``response_format`` or ``structured_outputs`` asks for."""
    wanted = body.response_format
    if wanted is None:
        return grammar(llm, body)
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise ApiError(400, "json_schema goes with the type json_schema", "response_format.json_schema")
    if wanted.type == "text":
        return grammar(llm, body)
    if body.structured_outputs is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both", "structured_outputs")
    schema = wanted.json_schema.json_schema if wanted.json_schema else None
    return compiled(body, "response_format", lambda: llm.grammars.json(schema))


def grammar(llm: LLM, body: Sampled) -> CompiledGrammar | None:
    wanted = body.structured_outputs
    if wanted is None:
        return None
    if (wanted.regex is None) == (wanted.json_schema is None):
        raise ApiError(400, "give either regex or json", "structured_outputs")
    if wanted.regex is not None:
        return compiled(body, "structured_outputs", lambda: llm.grammars.regex(wanted.regex or ""))
    return compiled(body, "structured_outputs", lambda: llm.grammars.json(wanted.json_schema))


def compiled(body: Sampled, param: str, compile_it: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """Where a grammar has nothing more to say a text has to end, so nothing may hold up its end."""
    if body.ignore_eos or body.min_tokens:
        name = "ignore_eos" if body.ignore_eos else "min_tokens"
        raise ApiError(400, f"{name} does not go with {param}: the grammar says where the text ends", name)
    try:
        return replace(compile_it(), field=param)
    except UserError as error:
        raise refusal(error, param) from error
