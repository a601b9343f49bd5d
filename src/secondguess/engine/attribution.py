"""Who guessed which characters of a streaming text."""

from __future__ import annotations

from collections import deque

from transformers import PreTrainedTokenizerBase

from secondguess.engine.sequence import TextStream
from secondguess.types import Delta, Origin


class Attribution:
    """Finds the characters of each token of a streaming answer.

    The text of a delta may lag behind its tokens (unfinished characters, half a stop string) or be cut (at a stop
    string). So the tokens are turned into text once more, and each token's characters wait until a delta brings them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._stream = TextStream(tokenizer)
        self._num_characters = 0
        self._waiting: deque[tuple[int, Origin]] = deque()  # characters of each token

    def split(self, delta: Delta) -> list[tuple[str, Origin]]:
        """The text of the answer's next delta by tokens; those that wrote nothing by themselves are left out."""
        for token, origin in zip(delta.token_ids, delta.origins, strict=True):
            self._stream.push(token)
            self._credit(origin)
        if delta.finish_reason:
            self._stream.flush()
            self._credit(delta.origins[-1])
        pieces, left = [], delta.text
        while left:
            length, origin = self._waiting.popleft()
            if length > len(left):
                self._waiting.appendleft((length - len(left), origin))
            pieces.append((left[:length], origin))
            left = left[length:]
        return pieces

    def _credit(self, origin: Origin) -> None:
        new = len(self._stream.text) - self._num_characters
        self._num_characters += new
        if new:
            self._waiting.append((new, origin))
