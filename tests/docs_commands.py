"""The code blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name != "lab.md"  # a notebook: its commands are of their day
}
DATA, PYTHON, OUTPUT = re.compile(r"[{]"), re.compile(r"(from|import) "), re.compile(r"(method|check|level \d) ")


@dataclass(frozen=True, slots=True)
class Command:
    page: str
    words: tuple[str, ...]
    text: str

    @property
    def argv(self) -> list[str] | None:
        """What ``secondguess`` is given; None if it is not called."""
        if self.words[:3] == ("make", "bench", self.words[-1]) and "=" in self.words[-1]:
            return ["bench", *shlex.split(self.words[-1].partition("=")[2])]
        if self.words[0] == "torchrun":
            return list(self.words[self.words.index("secondguess") + 1 :])
        return list(self.words[1:]) if self.words[0] in ("secondguess", ".venv/bin/secondguess") else None

    @property
    def line(self) -> str:
        """In one form, wherever it is called from."""
        ours = self.argv is not None and self.words[0] != "torchrun"
        return " ".join(["secondguess", *(self.argv or ())] if ours else self.words)


def blocks(page: str) -> Iterator[list[str]]:
    """The indented blocks of a page, line by line. No page uses fences."""
    text = PAGES[page].read_text(encoding="utf-8")
    assert "```" not in text, f"{page}: indent code by four spaces, so that this test finds it"
    for found in re.finditer(r"(?<=\n\n)((?: {4}.*\n|\n)+)", text):
        lines = [line[4:] for line in found[1].splitlines()]
        if any(lines):
            yield lines


def commands(page: str) -> list[Command]:
    found, variables = [], dict[str, str]()
    for block in blocks(page):
        if not any(kind.match(block[0]) for kind in (DATA, PYTHON, OUTPUT)):
            for text in whole_lines(block):
                words = words_of(text, variables)
                if words:
                    found.append(Command(page, words, text))
    return found


def python_blocks(page: str) -> list[str]:
    return ["\n".join(block) for block in blocks(page) if PYTHON.match(block[0])]


def whole_lines(block: list[str]) -> list[str]:
    """Lines of a shell: a backslash at the end, or a quotation that is open, goes on in the next."""
    whole: list[str] = []
    open_ = False
    for line in block:
        if open_:
            whole[-1] += "\n" + line
        elif line.strip():
            whole.append(line)
        open_ = bool(whole) and (whole[-1].endswith("\\") or whole[-1].count("'") % 2 == 1)
    return [line.replace("\\\n", " ") for line in whole]


def words_of(text: str, variables: dict[str, str]) -> tuple[str, ...]:
    """The words of a line, variables of the page put in; () for an assignment, which is kept in ``variables``."""
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    words = shlex.split(re.sub(r"\[(--[^\]]*)\]", r"\1", text), comments=True)  # a synopsis: [--port 8000]
    while words and re.fullmatch(r"[A-Za-z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return tuple(word for word in words if word != "&")
