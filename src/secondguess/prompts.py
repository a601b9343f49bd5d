"""From what a caller asks to token ids: the one place that knows about special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from secondguess.errors import UserError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int] | Sequence[Message]  # raw text, token ids, or a conversation


def encode(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt) -> tuple[int, ...]:
    """The token ids of a prompt.

    Raw text gets the special tokens that the tokenizer adds by itself (a beginning-of-text token, for some models). A
    conversation gets those of the model's chat template, and ends where the answer begins. Raises UserError when the
    target has no tokenizer or no chat template.
    """
    chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not chat and not isinstance(prompt, str):
        if not all(isinstance(token, int) for token in prompt):
            raise UserError("a prompt is text, token ids or messages; here it is a list of something else")
        return tuple(cast("Sequence[int]", prompt))
    if tokenizer is None:
        raise UserError("this target has no tokenizer: give prompts as token ids")
    if isinstance(prompt, str):
        check_text(prompt)
        return tuple(tokenizer.encode(prompt))
    if not tokenizer.chat_template:
        raise UserError("this target has no chat template: give raw text instead")
    messages = [checked_message(message) for message in cast("Sequence[Message]", prompt)]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def checked_message(message: Message) -> dict[str, Any]:
    """Raises UserError when a message has no role, or no text in what it holds."""
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
    if isinstance(prompts, Mapping):
        raise UserError("a conversation is a list of messages: put the message into one")
    if not isinstance(prompts, Sequence):
        raise UserError(f"a prompt is text, token ids or messages, got {prompts!r}")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    return [prompts] if single else list(prompts)
