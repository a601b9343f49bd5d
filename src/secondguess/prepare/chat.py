"""How a target is talked to, without the target: its tokenizer, chat template, end tokens and context."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from secondguess.errors import UserError
from secondguess.prompts import Chat as Conversation
from secondguess.prompts import Message, check_variables, encode
from secondguess.target.hf import HFTarget
from secondguess.target.load import DEFAULT, find_files
from secondguess.target.pretrained import Pretrained
from secondguess.target.quiet import quiet_transformers

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Chat:
    """``end_ids`` end an answer; ``context_len`` tokens hold a prompt and its answer.

    ``variables``: what the chat template gets besides the conversation, such as ``enable_thinking``.
    """

    tokenizer: PreTrainedTokenizerBase
    context_len: int
    end_ids: frozenset[int]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids that an answer to ``messages`` follows."""
        return encode(self.tokenizer, Conversation(messages, variables=self.variables))

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """Raises UserError when the template refuses the conversation, as some do one with a system prompt."""
        plain = [dict(message) for message in messages]
        how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": generation_prompt, **self.variables}
        try:
            text = self.tokenizer.apply_chat_template(plain, **how)
        except TemplateError as error:
            raise UserError(f"the chat template refuses a conversation ({error}): change the prompts") from error
        return str(text)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Token ids of text that has the template's special tokens in it; none are added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of an answer's text."""
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)


def chat_of(target: HFTarget, variables: Mapping[str, Any] = NOTHING) -> Chat:
    """That of a target that is loaded. Raises UserError when it has no chat template, or none with ``variables``."""
    return _checked(Chat(target.tokenizer, target.spec.context_len, target.spec.eos_token_ids, variables))


def load_chat(name: str, trust_remote_code: bool = False, variables: Mapping[str, Any] = NOTHING) -> Chat:
    """That of a target whose weights are elsewhere: of a hub id, only small files are fetched.

    Raises UserError when the target cannot be found or has no chat template, or none with ``variables``.
    """
    path = Path(name).expanduser()
    here = name == DEFAULT or path.suffix == ".gguf" or path.is_dir()
    files = Pretrained(name, trust_remote_code)
    if here:
        files = find_files(name, trust_remote_code, logging.getLogger(__name__).info)
    try:
        with quiet_transformers():
            config, tokenizer = files.config().get_text_config(), files.tokenizer()
            end, context_len = _generation_config(files.place, config).eos_token_id, config.max_position_embeddings
    except UserError:
        raise
    except Exception as error:  # missing, unreachable, damaged or foreign: the library raises nearly anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"cannot load the tokenizer of {name!r}: {reason}") from error
    ends = frozenset(end if isinstance(end, list) else [] if end is None else [end])
    return _checked(Chat(tokenizer, context_len, ends, variables))


def _generation_config(place: Path | str, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(place)
    except OSError:  # there is none
        return GenerationConfig.from_model_config(config)


def _checked(chat: Chat) -> Chat:
    if not getattr(chat.tokenizer, "chat_template", None):
        raise UserError("the target has no chat template: a base model does not answer")
    check_variables(chat.tokenizer, chat.variables)
    return chat
