"""An answer on a terminal: each token in the colour of whoever guessed it, words kept whole while it streams."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from secondguess.engine.sequence import TextStream
from secondguess.types import Delta, Origin

# What the model wrote itself, in prefill or as a bonus token, stays in the terminal's own colour.
STYLES: dict[Origin, str] = {"prefill": "", "bonus": "", "level0": "green", "refined": "bold magenta"}


class Painter:
    """Finds the characters of each token of a streaming answer.

    The text of a delta may lag behind its tokens (unfinished characters, half a stop string) or be cut (at a stop
    string). So the tokens are turned into text once more, and each character's origin waits until a delta brings it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._stream = TextStream(tokenizer)
        self._num_characters = 0
        self._waiting: list[Origin] = []

    def paint(self, delta: Delta) -> Text:
        """The text of the answer's next delta, styled."""
        for token, origin in zip(delta.token_ids, delta.origins, strict=True):
            self._stream.push(token)
            self._credit(origin)
        if delta.finish_reason:
            self._stream.flush()
            self._credit(delta.origins[-1])
        count = len(delta.text)
        origins, self._waiting = self._waiting[:count], self._waiting[count:]
        return Text.assemble(*((c, STYLES[origin]) for c, origin in zip(delta.text, origins, strict=True)))

    def _credit(self, origin: Origin) -> None:
        new = len(self._stream.text) - self._num_characters
        self._num_characters += new
        self._waiting += [origin] * new


class Writer:
    """Prints pieces of a text as they come. On a terminal, lines end between words; elsewhere the text is untouched."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0

    def write(self, piece: Text) -> None:
        if not self._console.is_terminal:
            self._console.file.write(piece.plain)
            return
        for word in piece.divide([space.start() for space in re.finditer(r"\s", piece.plain)]):
            self._put(word)

    def _put(self, word: Text) -> None:
        """Print a word with the space or line end before it. The comma that may follow needs a column too."""
        width = self._console.width
        if word.plain.startswith(" ") and self._column + word.cell_len >= width:
            word = Text("\n") + word[1:]
        if word.plain.startswith("\n"):
            self._column = cell_len(word.plain[1:])
        else:
            self._column += word.cell_len
        if self._column > width:  # longer than a line: the terminal has wrapped it
            self._column %= width
        self._console.print(word, end="", soft_wrap=True)


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        "Who wrote a token: ",
        ("level 0, the drafter at first sight", STYLES["level0"]),
        "; ",
        ("refined, what its second look added or raised", STYLES["refined"]),
        "; ",
        ("bonus, the model itself", STYLES["bonus"]),
        ".",
    )


def census(origins: Iterable[Origin]) -> Text:
    """How many tokens came from whom, in the colours of the text. Prefill is the model itself, as a bonus token is."""
    count = Counter(origins)
    return Text.assemble(
        (f"level 0: {count['level0']}", STYLES["level0"]),
        "  ",
        (f"refined: {count['refined']}", STYLES["refined"]),
        "  ",
        (f"bonus: {count['prefill'] + count['bonus']}", STYLES["bonus"]),
    )
