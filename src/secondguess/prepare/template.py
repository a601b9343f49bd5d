"""What a chat template fixes: where an answer begins and what ends it, where a user's words begin and what ends them.

Found by rendering a text that no template holds, so that any template will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from secondguess.errors import UserError
from secondguess.prepare.chat import Chat
from secondguess.prompts import Message

SENTINEL = "Sentinel7f3c9a"
MISMATCH = "so answers would be trained after prompts that are never served: mend the chat template"


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user's turn to be filled: what is to be continued, and what ends it if it is none of the target's end tokens.

    ``system`` as in ``Conversation``.
    """

    system: str | None
    prompt_ids: tuple[int, ...]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


def opening(system: str | None) -> list[Message]:
    """The messages before a user's first."""
    return [] if system is None else [{"role": "system", "content": system}]


def check_template(chat: Chat, system: str | None) -> None:
    """A row is cut in prompt and answer by the prompt's length. Raises UserError unless the template agrees: what it
    renders for a prompt must begin what it renders for the prompt with its answer.
    """
    messages = [*opening(system), user(SENTINEL)]
    prompt = chat.encode_rendered(chat.render(messages))
    whole = chat.encode_rendered(chat.render([*messages, assistant(SENTINEL)], generation_prompt=False))
    check_same(chat, ("for a prompt", prompt), ("for a prompt with its answer", whole[: len(prompt)]))


def check_same(chat: Chat, ours: tuple[str, Sequence[int]], theirs: tuple[str, Sequence[int]]) -> None:
    """Raises UserError, naming the first token that differs. Each side is what it is called, and token ids."""
    for at, pair in enumerate(zip_longest(ours[1], theirs[1])):
        if pair[0] != pair[1]:
            shown = ["nothing" if token is None else repr(str(chat.tokenizer.decode([token]))) for token in pair]
            raise UserError(
                f"template mismatch: token {at} is {shown[0]} {ours[0]}, and {shown[1]} {theirs[0]}, {MISMATCH}"
            )


def end_of_answer(chat: Chat) -> int | None:
    """The token that the target puts after an answer."""
    text = chat.render([user("Hi"), assistant(SENTINEL)], generation_prompt=False)
    after = chat.encode_rendered(text.rpartition(SENTINEL)[2])
    return next((token for token in after if token in chat.end_ids), chat.tokenizer.eos_token_id)


def user_turns(chat: Chat, system: str | None) -> list[UserTurn]:
    """After ``system``; or if that is None after the template's own system prompt, and also after an empty one where
    the template has its own.
    """
    turn = user_turn(chat, system)
    if system is not None:
        return [turn]
    try:
        bare = user_turn(chat, "")
    except UserError:  # the template takes no system prompt
        return [turn]
    return [turn, bare] if len(bare.prompt_ids) < len(turn.prompt_ids) else [turn]


def user_turn(chat: Chat, system: str | None) -> UserTurn:
    """Raises UserError when the template does not show what a user says as it is, or puts nothing before it."""
    messages = [*opening(system), user(SENTINEL)]
    before, found, after = chat.render(messages, generation_prompt=False).partition(SENTINEL)
    if not found:
        raise UserError("the chat template changes what a user says: --synthesize cannot tell where it begins")
    prompt_ids = chat.encode_rendered(before)
    if not prompt_ids:
        raise UserError("the chat template puts nothing before what a user says: --synthesize has nothing to continue")
    up_to_answer = chat.render(messages).partition(SENTINEL)[2]
    end = _special_end(chat, up_to_answer)
    if end is not None:
        return UserTurn(system, prompt_ids, (), () if end in chat.end_ids else (end,))
    stop = next(filter(None, (after.strip(), up_to_answer.strip(), up_to_answer)), None)
    return UserTurn(system, prompt_ids, (stop,) if stop else (), ())


def _special_end(chat: Chat, after: str) -> int | None:
    """The special token that follows a user's words, if nothing but white space is between."""
    for token in chat.encode_rendered(after):
        if token in chat.special_ids:
            return token
        if str(chat.tokenizer.decode([token])).strip():
            return None
    return None


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
