"""Log-probabilities of tokens as clients get them: what a token reads as, and where its text begins."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from secondguess.engine.sampler_state import end_ids
from secondguess.engine.sequence import REPLACEMENT, TextStream
from secondguess.llm import LLM
from secondguess.types import Request, TokenLogprobs

# How byte-level vocabularies write bytes: those that Latin-1 prints as themselves, others as characters from 256 on.
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = {chr(byte): byte for byte in PRINTED}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTED)}
CACHED = 2**16  # texts of tokens: top_logprobs name the same ones again and again


@dataclass(frozen=True, slots=True)
class Score:
    logprobs: TokenLogprobs
    offset: int  # of the token's text in the whole, in characters


class Scores:
    """Of one choice. Where stop strings may cut the text, a token's come no sooner than its text, or not at all."""

    def __init__(self, llm: LLM, request: Request, start: int = 0) -> None:
        """``start``: characters before the answer."""
        params, self.start = request.params, start
        self.stream = TextStream(llm.target.tokenizer)
        self.may_be_cut = bool(params.stop)
        self.end_ids = end_ids(params, llm.target.spec.eos_token_ids)
        self.waiting: deque[Score] = deque()
        self.length = 0  # characters of the answer so far

    def take(self, tokens: Sequence[TokenLogprobs], text: str, reason: str | None) -> list[Score]:
        """What may be told now. ``tokens`` and ``text`` are new; with a ``reason`` they are the last."""
        self.length += len(text)
        for token in tokens:
            self.waiting.append(Score(token, self.start + len(self.stream.text)))
            self.stream.push(token.token)
        cut = reason == "stop" and self.waiting and self.waiting[-1].logprobs.token not in self.end_ids
        if not self.may_be_cut or (reason and not cut):
            ready = list(self.waiting)
        else:
            ready = [score for score in self.waiting if score.offset < self.start + self.length]
        self.waiting = deque() if reason else deque(list(self.waiting)[len(ready) :])
        return ready


def prompt_scores(llm: LLM, request: Request, logprobs: Sequence[TokenLogprobs]) -> list[Score]:
    """Of an echoed prompt's tokens but the first. Ids are echoed with their special tokens, which a text has not."""
    stream, scores = TextStream(llm.target.tokenizer, special=request.text is None), []
    stream.push(request.prompt_ids[0])
    for t in logprobs:
        scores.append(Score(t, len(stream.text)))
        stream.push(t.token)
    return scores


@lru_cache(CACHED)
def token_text(llm: LLM, token: int) -> str:
    """Of the token by itself."""
    return llm.decode([token]) if llm.target.tokenizer else f"token_id:{token}"


@lru_cache(CACHED)
def token_bytes(llm: LLM, token: int) -> bytes:
    """Of a part of a character, which has no text, as the vocabulary has them."""
    text = token_text(llm, token)
    if REPLACEMENT not in text:
        return text.encode()
    piece = str(llm.target.tokenizer.convert_ids_to_tokens(token))
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes([int(byte[1], 16)])
    return bytes(BYTES[c] for c in piece) if all(c in BYTES for c in piece) else text.encode()


def by_text(llm: LLM, t: TokenLogprobs) -> dict[str, float]:
    """The best tokens' log-probabilities, and the token's own. Of tokens that read alike, all but one go by ids."""
    names: dict[int, str] = {}
    for token in (t.token, *(token for token, _ in t.top)):
        text = token_text(llm, token)
        names.setdefault(token, f"token_id:{token}" if text in names.values() else text)
    return {names[token]: logprob for token, logprob in (*t.top, (t.token, t.logprob))}
