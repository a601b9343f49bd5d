"""From what a caller asks to token ids: the one place that knows about special tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from secondguess.errors import UserError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and what the model's chat template gets besides."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of functions, as the OpenAI API has them
    variables: Mapping[str, Any] = field(default_factory=dict)  # such as enable_thinking


Prompt = str | Sequence[int] | Sequence[Message] | Chat  # raw text, token ids, or a conversation


def encode(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt) -> tuple[int, ...]:
    """The token ids of a prompt.

    Raw text gets the special tokens that the tokenizer adds by itself (a beginning-of-text token, for some models). A
    conversation gets those of the model's chat template, and ends where the answer begins. Raises UserError when the
    target has no tokenizer or no chat template.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(NO_TOKENIZER)
        check_text(prompt)
        return tuple(tokenizer.encode(prompt))
    if chat := as_chat(prompt):
        return _render(tokenizer, chat)
    ids = cast("Sequence[Any]", prompt)
    if not all(isinstance(token, int) for token in ids):
        raise UserError("a prompt is text, token ids or messages; here it is a list of something else")
    return tuple(ids)


def as_chat(prompt: Prompt) -> Chat | None:
    """A conversation, if it is one."""
    if isinstance(prompt, Chat):
        return prompt
    if isinstance(prompt, str) or not (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        return None
    return Chat(cast("Sequence[Message]", prompt))


def ends_with(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    """Whether what the token ids say ends with ``text``."""
    most = len(text.encode()) + 8  # a token is a byte at least; some tokenizers lose a space where a text begins
    return str(tokenizer.decode(list(ids[-most:]), clean_up_tokenization_spaces=False)).endswith(text)


NO_TOKENIZER = "this target has no tokenizer: give prompts as token ids"


def _render(tokenizer: PreTrainedTokenizerBase | None, chat: Chat) -> tuple[int, ...]:
    if tokenizer is None:
        raise UserError(NO_TOKENIZER)
    if not tokenizer.chat_template:
        raise UserError("this target has no chat template: give raw text instead")
    refuse_settings(tokenizer, chat.variables)
    chat = replace(chat, messages=[checked_message(message) for message in chat.messages])
    try:
        text = _fill_in(tokenizer, chat)
    except Exception as error:  # a template is foreign code, and this is how it refuses a conversation
        said = f"the model's chat template does not take this conversation: {error}"
        raise UserError(said, _blamed(tokenizer, chat)) from error
    check_text(text)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _fill_in(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """The template's text, or whatever error it raises."""
    messages: Any = list(chat.messages)
    more: dict[str, Any] = {**chat.variables, "tools": [dict(tool) for tool in chat.tools] or None}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))


def _blamed(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """The field without which the template takes a conversation that it does not take as it is."""
    for name, less in (("variables", replace(chat, variables={})), ("tools", replace(chat, tools=()))):
        with suppress(Exception):
            if less != chat and _fill_in(tokenizer, less):
                return name
    return "messages"


def refuse_settings(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Raises UserError for a variable whose name is a setting of how templates are used."""
    settings = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in settings:
            raise UserError(f"{name!r} is no variable that a chat template can be given: leave it out", "variables")


def check_variables(tokenizer: PreTrainedTokenizerBase | None, variables: Mapping[str, Any]) -> None:
    """Raises UserError for a variable that the target's chat template does not have."""
    if not variables:
        return
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError("this target has no chat template, so it takes no template variables: leave them out")
    refuse_settings(tokenizer, variables)
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UserError(f"the target's chat template has no variable {name!r}: leave it out")


def checked_message(message: Message) -> dict[str, Any]:
    """Raises UserError when a message has no role, or neither text nor a call of a tool."""
    if message.get("content") is None and message.get("tool_calls"):
        message = {**message, "content": ""}
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise UserError(f"a message needs {name!r}, a text: {dict(message)}")
    check_text(message["content"])
    return dict(message)


def check_text(text: str) -> None:
    """Raises UserError when ``text`` holds half a character, as undecodable input becomes in Python."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text[:20]!r} is no Unicode text at character {error.start}: give UTF-8") from error


def as_list(prompts: Any) -> list[Prompt]:
    """A string, a flat list of token ids or one of messages is one prompt, anything else a list of them."""
    if isinstance(prompts, Chat):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise UserError("a conversation is a list of messages: put the message into one")
    if not isinstance(prompts, Sequence):
        raise UserError(f"a prompt is text, token ids or messages, got {prompts!r}")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    return [prompts] if single else list(prompts)
