"""Benchmark text in training prompts: tau measured on a prompt that was trained on is no measurement."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

NGRAM = 13  # words in a row, as GPT-3's authors counted (arXiv 2005.14165, appendix C)


# Scripts that put no space between words: Thai, Lao, Burmese, Khmer; Japanese kana, and Han with its extensions.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
SPACELESS += "\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(f"[{SPACELESS}]|[^\\W_{SPACELESS}]+")


def words(text: str) -> list[str]:
    """Runs of letters and digits in one case and width; punctuation and white space do not tell texts apart. Where
    words have no space between them, a character counts as one.
    """
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(text: str) -> Iterator[tuple[str, ...]]:
    """All runs of NGRAM words, or the whole text if it is shorter; none of a text without words."""
    found = words(text)
    for i in range(max(1, len(found) - NGRAM + 1) if found else 0):
        yield tuple(found[i : i + NGRAM])


class Index:
    """The n-grams of texts, to be looked for in others."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._ngrams = {gram for text in texts for gram in ngrams(text)}

    def shared(self, text: str) -> str | None:
        """The first run of words that ``text`` shares with an indexed text."""
        return next((" ".join(gram) for gram in ngrams(text) if gram in self._ngrams), None)
