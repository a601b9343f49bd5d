"""Answers as the OpenAI API writes them, whole or in parts."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from secondguess.llm import LLM
from secondguess.server.accounts import metrics, num_cached_tokens, num_prompt_tokens, usage
from secondguess.server.scores import Score, Scores, by_text, prompt_scores, token_bytes, token_text
from secondguess.types import Delta, Output, Request


class Shape(ABC):
    """One answer with a choice for each request. A part of it has one choice, or none and the usage."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    kind_of_parts: ClassVar[str]

    def __init__(self, llm: LLM, model: str, requests: Sequence[Request], num_choices: int) -> None:
        """``num_choices``: requests in a row that have the same prompt."""
        self.llm, self.requests, self.num_choices = llm, requests, num_choices
        self.scores = [Scores(llm, request) for request in requests]
        self.head = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self.head["system_fingerprint"] = f"fp_{llm.target.fingerprint[:10]}"
        self.prompt_tokens = num_prompt_tokens(requests, num_choices)

    @abstractmethod
    def choice(self, i: int, output: Output) -> dict[str, Any]:
        """Choice number ``i``, whole."""

    @abstractmethod
    def pieces(self, i: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a delta adds to choice number ``i``: none, one or several pieces, the end of the choice by itself."""

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices = [self.choice(i, output) for i, output in enumerate(outputs)]
        return {"object": self.kind, **self.head, "choices": choices, **self._costs(outputs)}

    def part(self, piece: dict[str, Any]) -> dict[str, Any]:
        return {"object": self.kind_of_parts, **self.head, "choices": [piece]}

    def drafting(self, told: dict[str, Any]) -> dict[str, Any]:
        """A part without a choice, which clients that do not know it pass over."""
        return {"object": self.kind_of_parts, **self.head, "choices": [], "drafting": told}

    def last(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return {"object": self.kind_of_parts, **self.head, "choices": [], **self._costs(outputs)}

    def usage(self, num_tokens: int) -> dict[str, int]:
        return usage(self.prompt_tokens, num_tokens)

    def token_text(self, token: int) -> str:
        return token_text(self.llm, token)

    def _costs(self, outputs: Sequence[Output]) -> dict[str, Any]:
        usage: dict[str, Any] = self.usage(sum(len(output.token_ids) for output in outputs))
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens(outputs, self.num_choices)}
        return {"usage": usage, "metrics": metrics(self.llm, self.requests, outputs)}


class ChatShape(Shape):
    prefix, kind, kind_of_parts = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, llm: LLM, model: str, requests: Sequence[Request], num_choices: int) -> None:
        super().__init__(llm, model, requests, num_choices)
        self.begun: set[int] = set()

    def choice(self, i: int, output: Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        scores = self.scores[i].take(output.logprobs, output.text, output.finish_reason)
        rest = {"logprobs": self.logprobs(scores), "finish_reason": output.finish_reason}
        return {"index": i, "message": message, **rest}

    def pieces(self, i: int, delta: Delta) -> Iterator[dict[str, Any]]:
        def piece(said: dict[str, Any], **more: Any) -> dict[str, Any]:
            return {"index": i, "delta": said, "logprobs": None, "finish_reason": None, **more}

        if i not in self.begun:
            self.begun.add(i)
            yield piece({"role": "assistant", "content": ""})
        scores = self.scores[i].take(delta.logprobs, delta.text, delta.finish_reason)
        if delta.text or scores:
            yield piece({"content": delta.text}, logprobs=self.logprobs(scores))
        if delta.finish_reason:
            yield piece({}, finish_reason=delta.finish_reason)

    def logprobs(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        """None if there are none."""
        if not scores:
            return None
        content = [
            {**self.entry(t.token, t.logprob), "top_logprobs": [self.entry(token, logp) for token, logp in t.top]}
            for t in (score.logprobs for score in scores)
        ]
        return {"content": content, "refusal": None}

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": logprob, "bytes": list(token_bytes(self.llm, token))}


class CompletionShape(Shape):
    prefix, kind, kind_of_parts = "cmpl-", "text_completion", "text_completion"

    def __init__(self, llm: LLM, model: str, requests: Sequence[Request], num_choices: int, echo: bool) -> None:
        super().__init__(llm, model, requests, num_choices)
        self.echo = [self.prompt(request) if echo else "" for request in requests]  # what is still to be echoed
        for scores, text in zip(self.scores, self.echo, strict=True):
            scores.start = len(text)

    def choice(self, i: int, output: Output) -> dict[str, Any]:
        text = self.echo[i] + output.text
        scores = self.scores[i].take(output.logprobs, output.text, output.finish_reason)
        if self.echo[i] and output.logprobs:
            return self.echoed(i, output, text, scores)
        return self.piece(i, text, scores, output.finish_reason)

    def echoed(self, i: int, output: Output, text: str, scores: Sequence[Score]) -> dict[str, Any]:
        """With the log-probabilities of prompt and answer; a text's first token has none."""
        first, prompt = output.prompt_ids[0], prompt_scores(self.llm, self.requests[i], output.prompt_logprobs)
        columns = self.columns([*prompt, *scores])
        for name, value in (("tokens", self.token_text(first)), ("text_offset", 0)):
            columns[name].insert(0, value)
        for name in ("token_logprobs", "top_logprobs"):
            columns[name].insert(0, None)
        return self.piece(i, text, (), output.finish_reason) | {"logprobs": columns}

    def pieces(self, i: int, delta: Delta) -> Iterator[dict[str, Any]]:
        text, self.echo[i] = self.echo[i] + delta.text, ""
        scores = self.scores[i].take(delta.logprobs, delta.text, delta.finish_reason)
        if text or scores:
            yield self.piece(i, text, scores, None)
        if delta.finish_reason:
            yield self.piece(i, "", (), delta.finish_reason)

    def piece(self, i: int, text: str, scores: Sequence[Score], reason: str | None) -> dict[str, Any]:
        return {"index": i, "text": text, "logprobs": self.columns(scores) if scores else None, "finish_reason": reason}

    def prompt(self, request: Request) -> str:
        return self.llm.decode(request.prompt_ids) if request.text is None else request.text

    def columns(self, scores: Sequence[Score]) -> dict[str, list[Any]]:
        tokens = [score.logprobs for score in scores]
        return {
            "tokens": [self.token_text(t.token) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [by_text(self.llm, t) for t in tokens],
            "text_offset": [score.offset for score in scores],
        }
