"""Rows of an answer file as they are trained on: the prompt dim, trained tokens coloured, special tokens to be seen."""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from secondguess.errors import UserError
from secondguess.prepare.chat import Chat
from secondguess.train.data import Response, parse_response

PROMPT, FIRST, TRAINED, SPECIAL = "dim", "yellow", "green", "reverse"
ANY_VOCABULARY = 1 << 31  # a target may have more rows than its tokenizer has tokens; here nothing depends on it


def show_rows(chat: Chat, path: Path, count: int, console: Console) -> None:
    """The first ``count`` rows. Raises UserError where a line is none."""
    if not count:
        return
    for response in read_rows(path, count):
        answer = len(response.answer)
        title = Text(f"{response.id}: {response.prompt_len} tokens of prompt, {answer} of answer")
        console.print(Rule(title, align="left", style="dim"))
        console.print(paint(chat, response), soft_wrap=True)
    console.print("", legend(), sep="\n")


def read_rows(path: Path, count: int) -> list[Response]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(islice(file, count))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return [parse_response(line, f"{path}:{number}", ANY_VOCABULARY) for number, line in enumerate(lines, 1)]


def paint(chat: Chat, response: Response) -> Text:
    """The row's text, token by token in the style of what is done with it."""
    ids, special, text, done = list(response.input_ids), chat.special_ids, Text(), ""

    def style(i: int) -> str:
        part = PROMPT if i < response.prompt_len else FIRST if i == response.prompt_len else TRAINED
        return f"{part} {SPECIAL}" if ids[i] in special else part

    for part, group in groupby(range(len(ids)), key=style):
        *_, last = group
        # All that came before is decoded again: alone, a token may lose its space, or be half a character.
        upto = str(chat.tokenizer.decode(ids[: last + 1], clean_up_tokenization_spaces=False))
        text.append(upto[len(done) :], part)
        done = upto
    return text


def legend() -> Text:
    return Text.assemble(
        "Prompt ",
        ("dim", PROMPT),
        "; ",
        ("the first token of the answer", FIRST),
        ", which prefill gives; ",
        ("trained", TRAINED),
        "; ",
        ("special tokens", SPECIAL),
        ".",
    )
