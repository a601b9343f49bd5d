"""An OpenAI-compatible server as the answerer: the target, run by vLLM, SGLang, llama.cpp or any other engine.

Whoever imports this needs httpx2.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from secondguess.errors import UserError
from secondguess.prepare.answerer import Question, Reply, TooLong
from secondguess.prepare.chat import Chat
from secondguess.prepare.post import Refused, Server
from secondguess.prepare.template import MISMATCH, check_same, end_of_answer, user
from secondguess.types import SamplingParams

NOT_TAKEN = (400, 422)  # what strict servers say to a field that they do not know
TOO_LONG = (400, 413, 422)  # and to a prompt that has no room
# What is asked beside token ids of a server that takes more than OpenAI's fields: to draw from the whole distribution,
# whatever the target's generation_config.json would have it draw from.
AS_IT_IS = {"return_token_ids": True, "min_p": 0.0, "repetition_penalty": 1.0}


class Endpoint:
    """A context manager. ``room`` questions are asked at once.

    Where the server tells token ids (vLLM's ``return_token_ids``), they are taken. Elsewhere the text is tokenised as
    what follows its prompt, and is unknown if that does not give it back.
    """

    def __init__(self, url: str, model: str, key: str | None, chat: Chat, room: int) -> None:
        self.room = room
        self._server, self._model, self._chat = Server(url, key, room), model, chat
        self._end = end_of_answer(chat)
        self._ask_for_ids = True  # until that is refused
        self._has_answered = self._has_refused = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def answer(self, question: Question) -> Reply | None:
        """Raises what ``Server.post`` does, TooLong instead where another question would have been answered, and
        UserError for an answer that is none of the API's, or that was given to another prompt than ours.
        """
        try:
            found = await self._ask(question)
        except Refused as refused:
            if refused.status in TOO_LONG and question.messages and await self._answers_at_all():
                raise self._too_long(refused) from refused
            raise
        try:
            choice = found["choices"][0]
            said = choice["message"] if question.messages else {"content": choice["text"]}
            text, reason = said.get("content") or "", choice["finish_reason"]
        except (LookupError, TypeError, AttributeError) as error:
            message = f"{self._server.url} does not answer as OpenAI's API does ({error!r}): check --endpoint"
            raise UserError(message) from error
        if prompt_ids := found.get("prompt_token_ids"):
            check_same(self._chat, ("here", question.prompt_ids), ("on the server", prompt_ids))
        self._check_length(found, question)
        self._has_answered = True
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = self._tokens_of(question, said, text)
        if tokens is None or reason not in ("stop", "length"):
            return None
        ended = reason == "stop"
        written = self._with_end(tokens) if ended else tuple(tokens)
        return Reply(written, text, ended) if written or not question.messages else None

    async def _ask(self, question: Question) -> dict[str, Any]:
        fields = {"model": self._model} | sampling_fields(question.params)
        if question.messages:
            route, fields = "chat/completions", fields | {"messages": list(question.messages)}
            if self._chat.variables:
                fields["chat_template_kwargs"] = dict(self._chat.variables)
        else:
            route, fields = "completions", fields | {"prompt": list(question.prompt_ids)}
        if self._ask_for_ids:
            try:
                return await self._server.post(route, fields | AS_IT_IS | {"top_k": question.params.top_k or -1})
            except Refused as refused:
                if refused.status not in NOT_TAKEN:
                    raise
        found = await self._server.post(route, fields)
        self._ask_for_ids = False
        return found

    async def _answers_at_all(self) -> bool:
        """Whether what was refused is the conversation's fault: of a server that has not answered yet, a short question
        finds out.
        """
        if not self._has_answered:
            try:
                await self._ask(Question((), SamplingParams(max_tokens=1, seed=0), (user("Hi"),)))
            except Refused:
                return False
            self._has_answered = True
        return True

    def _too_long(self, refused: Refused) -> TooLong:
        if not self._has_refused:  # once is enough
            logging.getLogger(__name__).warning("a conversation is left out: %s", refused)
        self._has_refused = True
        return TooLong(str(refused))

    def _check_length(self, found: Mapping[str, Any], question: Question) -> None:
        """Also servers that tell no token ids count those of the prompt."""
        ours, theirs = len(question.prompt_ids), (found.get("usage") or {}).get("prompt_tokens")
        if theirs and theirs != ours:
            raise UserError(
                f"template mismatch: the prompt has {ours} tokens here, and {theirs} on the server, {MISMATCH}"
            )

    def _tokens_of(self, question: Question, said: Mapping[str, Any], text: str) -> list[int] | None:
        """Those after the prompt when both are tokenised as one text; None if they are not exactly ``text`` again."""
        if not question.messages:
            return []  # whoever continues no conversation wants the text
        if said.get("reasoning_content") or said.get("reasoning"):
            return None  # written, too, but taken out of the text
        chat, num_prompt = self._chat, len(question.prompt_ids)
        whole = chat.encode_rendered(chat.render(question.messages) + text)
        tokens = list(whole[num_prompt:])
        again = chat.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return tokens if whole[:num_prompt] == question.prompt_ids and again == text else None

    def _with_end(self, tokens: list[int]) -> tuple[int, ...]:
        """And the token that ended it, which not every server tells."""
        if self._end is None or (tokens and tokens[-1] in self._chat.end_ids):
            return tuple(tokens)
        return (*tokens, self._end)


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Those that every server knows, and others only where they are needed. What is left out the server chooses."""
    always = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
    }
    needed: dict[str, Any] = {
        "top_k": params.top_k,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
    }
    return always | {name: value for name, value in needed.items() if value}
