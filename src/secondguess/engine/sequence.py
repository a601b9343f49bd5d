"""One request in flight, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from secondguess.types import Drafting, FinishReason, Origin, Request, TokenLogprobs

if TYPE_CHECKING:
    from secondguess.engine.cycle import CycleTrace

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns token ids into text piece by piece; holds back bytes of unfinished characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, special: bool = False) -> None:
        """``special``: whether special tokens are text."""
        self.tokenizer, self.special = tokenizer, special
        self.ids: list[int] = []
        self.text = ""
        self._start, self._read = 0, 0  # decode from _start; up to _read it is in the text already

    def push(self, token: int) -> None:
        self.ids.append(token)
        if self.tokenizer is None:
            return
        # Decoding a few tokens back keeps the spaces that a lone token would lose.
        before, after = self._decode(self.ids[self._start : self._read]), self._decode(self.ids[self._start :])
        if not after.endswith(REPLACEMENT):
            self.text += after[len(before) :]
            self._start, self._read = self._read, len(self.ids)

    def cut(self, end: int) -> None:
        """The end: the text stops before character ``end``, and what is still unfinished is dropped."""
        self.text = self.text[:end]
        self._start = self._read = len(self.ids)

    def flush(self) -> None:
        """The end: what is still unfinished stays as replacement characters. After a cut nothing is."""
        if self.tokenizer is not None and self._read < len(self.ids):
            before, after = self._decode(self.ids[self._start : self._read]), self._decode(self.ids[self._start :])
            self.text += after[len(before) :]
            self._start = self._read = len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(ids, skip_special_tokens=not self.special, clean_up_tokenization_spaces=False))


@dataclass(slots=True)
class Timing:
    """Seconds, summed over the cycles of a request."""

    queue: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    walk: float = 0.0
    rest: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request. ``token_ids`` are prompt and emitted tokens; all but the newest are in the target's cache.

    A stop string ends the text if it ends in the text of token number ``min_tokens`` or of a later one. That is looked
    for token by token, so it depends neither on how tokens were grouped nor on when the text was handed out.
    """

    request: Request
    seed: int
    slot: int
    end_ids: frozenset[int]
    max_len: int  # prompt and answer together
    stream: TextStream
    token_ids: list[int]
    origins: list[Origin] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    fault: Exception | None = None  # why it was ended as "abort", unless its listener wanted that
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if they were asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token but the first, likewise
    traces: list[CycleTrace] = field(default_factory=list)  # not handed out yet, if the request is traced
    timing: Timing = field(default_factory=Timing)
    drafting: Drafting = field(default_factory=Drafting)
    num_reused: int = 0  # tokens of the prompt that were in the caches when it came
    submitted: float = 0.0  # when it was queued first
    queued: float = 0.0  # when it was queued last
    searched_text: int = 0  # stop strings that end in this part of the text are none
    streamed_tokens: int = 0
    streamed_text: int = 0

    @property
    def num_cached(self) -> int:
        return len(self.token_ids) - 1

    @property
    def emitted(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]

    def emit(self, token: int, origin: Origin, logprobs: TokenLogprobs | None = None) -> None:
        """Take one more token and see whether it is the last. Tokens after the last one are not taken."""
        if self.finish_reason:
            return
        self.token_ids.append(token)
        self.origins.append(origin)
        if logprobs:
            self.logprobs.append(logprobs)
        if token in self.end_ids:
            self.finish("stop")
            return
        self.stream.push(token)
        if (end := self._find_stop()) is not None:
            self.stream.cut(end)
            self.finish("stop")
        elif len(self.origins) >= self.request.params.max_tokens or len(self.token_ids) >= self.max_len:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """No more tokens. A request that has ended already keeps its reason."""
        if self.finish_reason is None:
            self.stream.flush()
            self.finish_reason = reason

    def _find_stop(self) -> int | None:
        """Where the earliest stop string that the newest token completed begins. It may span tokens."""
        text, searched = self.stream.text, self.searched_text
        self.searched_text = len(text)
        if len(self.origins) < self.request.params.min_tokens:
            return None
        begins = (text.find(stop, max(0, searched + 1 - len(stop))) for stop in self.request.params.stop)
        return min((begin for begin in begins if begin >= 0), default=None)

    @property
    def has_news(self) -> bool:
        """Whether there are tokens not handed out yet."""
        return self.streamed_tokens < len(self.origins)

    def new_tokens(self) -> tuple[tuple[int, ...], tuple[Origin, ...], tuple[TokenLogprobs, ...]]:
        """Tokens not handed out yet, their origins, and their log-probabilities if they were asked for."""
        seen, self.streamed_tokens = self.streamed_tokens, len(self.origins)
        ids = self.token_ids[len(self.request.prompt_ids) + seen :]
        return tuple(ids), tuple(self.origins[seen:]), tuple(self.logprobs[seen:])

    def new_traces(self) -> tuple[CycleTrace, ...]:
        """Traces not handed out yet."""
        traces, self.traces = self.traces, []
        return tuple(traces)

    def new_text(self) -> str:
        """Text not handed out yet; while running, the tail that may turn into a stop string is held back."""
        text, hold = self.stream.text, 0
        if self.finish_reason is None:
            hold = max((longest_overlap(text, stop) for stop in self.request.params.stop), default=0)
        piece = text[self.streamed_text : len(text) - hold]
        self.streamed_text += len(piece)
        return piece


def longest_overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
