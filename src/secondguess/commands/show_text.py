"""An answer on a terminal: each token in the colour of whoever guessed it, words kept whole while it streams."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from secondguess.engine.attribution import Attribution
from secondguess.types import Delta, Origin

# What the model wrote itself, in prefill or as a bonus token, stays in the terminal's own colour.
STYLES: dict[Origin, str] = {"prefill": "", "bonus": "", "level0": "green", "refined": "bold magenta"}


class Painter:
    """Colours a streaming answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._attribution = Attribution(tokenizer)

    def paint(self, delta: Delta) -> Text:
        """The text of the answer's next delta, styled."""
        return Text.assemble(*((text, STYLES[origin]) for text, origin in self._attribution.split(delta)))


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
