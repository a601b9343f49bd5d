"""Tokens find their colours, words stay whole, trees are drawn with what came of them."""

from __future__ import annotations

import io
from textwrap import dedent

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from secondguess.commands.show_table import Run, num_identical, table, total
from secondguess.commands.show_text import STYLES, Painter, Writer, census
from secondguess.commands.show_tree import draw_tree
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.sequence import Sequence, TextStream
from secondguess.types import Delta, DraftTree, Origin, Output, Request, SamplingParams, Stats, Verdict
from tiny_folder import byte_tokenizer

BYTES = byte_tokenizer()
ORIGINS: list[Origin] = ["prefill", "level0", "refined", "bonus"]


def deltas(tokens: list[tuple[int, Origin]], cuts: set[int], stop: tuple[str, ...]) -> tuple[list[Delta], Sequence]:
    """What an LLM streams of these tokens when a cycle ends after each token number in ``cuts``."""
    params = SamplingParams(max_tokens=len(tokens), stop=stop)
    s = Sequence(Request((1,), params), 0, 0, frozenset({0}), 10**6, TextStream(BYTES), [1])
    made = []
    for i, (token, origin) in enumerate(tokens):
        s.emit(token, origin)
        if s.finish_reason:
            s.stream.flush()
        if i in cuts or s.finish_reason:
            new = slice(s.streamed_tokens, len(s.origins))
            made.append(Delta(tuple(s.emitted[new]), tuple(s.origins[new]), s.new_text(), s.finish_reason))
            s.streamed_tokens = len(s.origins)
        if s.finish_reason:
            break
    return made, s


def styles(text: Text) -> list[str]:
    """The style of each character."""
    return [next((str(span.style) for span in text.spans if span.start <= i < span.end), "") for i in range(len(text))]


answers = st.lists(st.tuples(st.integers(0, 256), st.sampled_from(ORIGINS)), min_size=1, max_size=30)


@settings(deadline=None)
@given(answers, st.sets(st.integers(0, 30)), st.lists(st.text(max_size=2, min_size=1), max_size=2).map(tuple))
def test_painted_text_is_the_streamed_text(tokens, cuts, stop) -> None:
    made, sequence = deltas(tokens, cuts, stop)
    painter = Painter(BYTES)
    painted = [painter.paint(delta) for delta in made]
    # rich drops a few control characters from what it shows.
    assert [p.plain for p in painted] == [Text(delta.text).plain for delta in made]
    assert "".join(delta.text for delta in made) == sequence.stream.text


ascii_answers = st.lists(st.tuples(st.sampled_from("abc \n"), st.sampled_from(ORIGINS)), min_size=1, max_size=30)


@settings(deadline=None)
@given(ascii_answers, st.sets(st.integers(0, 30)))
def test_each_character_has_the_colour_of_its_token(letters, cuts) -> None:
    made, sequence = deltas([(BYTES.encode(c)[0], origin) for c, origin in letters], cuts, ("cab",))
    painter = Painter(BYTES)
    shown = [style for delta in made for style in styles(painter.paint(delta))]
    assert shown == [STYLES[origin] for _, origin in letters][: len(sequence.stream.text)]


def test_a_character_of_several_tokens_has_the_colour_of_the_last() -> None:
    made, _ = deltas(list(zip(BYTES.encode("\N{EURO SIGN}"), ORIGINS[:3], strict=True)), {0, 1}, ())
    painter = Painter(BYTES)
    *early, last = (painter.paint(delta) for delta in made)
    assert [text.plain for text in early] == ["", ""]
    assert (last.plain, styles(last)) == ("\N{EURO SIGN}", [STYLES["refined"]])


def written(pieces: list[str], width: int, terminal: bool = True) -> str:
    file = io.StringIO()
    writer = Writer(Console(file=file, width=width, force_terminal=terminal, color_system=None))
    for piece in pieces:
        writer.write(Text(piece))
    return file.getvalue()


def test_lines_break_between_words() -> None:
    assert written(["one two", " three", " four\nfive six"], 11) == "one two\nthree four\nfive six"
    assert written(["a  b", "   c"], 5) == "a  b\n  c"


def test_a_line_has_room_for_the_comma() -> None:
    assert written(["one two", ","], 8) == "one two,"
    assert written(["one two", ","], 7) == "one\ntwo,"


def test_words_longer_than_a_line_are_left_to_the_terminal() -> None:
    assert written(["ab", "cdefghij", " kl mn"], 4) == "abcdefghij\nkl\nmn"


def test_a_file_gets_the_text_as_it_is() -> None:
    assert written(["one two", " three\tfour"], 4, terminal=False) == "one two three\tfour"


@settings(deadline=None)
@given(st.lists(st.text("ab \n", max_size=8), max_size=20), st.integers(8, 20))
def test_wrapping_changes_spaces_into_line_ends_and_nothing_else(pieces, width) -> None:
    text, out = "".join(pieces), written(pieces, width)
    assert len(out) == len(text)
    assert all(a == b or (a, b) == (" ", "\n") for a, b in zip(text, out, strict=True))


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=8), max_size=20), st.integers(8, 20))
def test_whole_words_make_lines_that_fit(words, width) -> None:
    assert all(len(line) <= width for line in written([f" {word}" for word in words], width).split("\n"))


def test_census_counts_tokens() -> None:
    text = census(["prefill", "level0", "level0", "refined", "bonus"]).plain
    assert text == "level 0: 2  refined: 1  bonus: 2"


def trace() -> CycleTrace:
    """a -> b (50 %), c (refined, 25 %); b -> d (100 %); b and d are accepted, then comes e. A node of padding."""
    tree = DraftTree(
        tokens_RN=torch.tensor([[1, 3, 2, 4, 0]]),
        parents_RN=torch.tensor([[-1, 0, 0, 2, -1]]),
        depths_RN=torch.tensor([[0, 1, 1, 2, 0]]),
        levels_RN=torch.tensor([[0, 1, 0, 0, 0]]),
        scores_RN=torch.tensor([[1.0, 0.25, 0.5, 0.5, 0.0]]).log(),
        valid_RN=torch.tensor([[True, True, True, True, False]]),
    )
    verdict = Verdict(torch.tensor([[0, 2, 3]]), torch.tensor([[2, 4, 5]]), torch.tensor([3]))
    return CycleTrace(tree, verdict)


def drawn(encoding: str) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=60).print(draw_tree(trace(), lambda token: " abcde"[token]))
    file.seek(0)
    return file.read()


def test_a_drawn_tree() -> None:
    expected = """\
        'a' newest token
        +-- 'b' 50% 0 accepted
        |   `-- 'd' 100% 0 accepted
        |       `-- 'e' bonus
        `-- 'c' 25% R
        """
    assert drawn("ascii") == dedent(expected)
    assert "\N{BOX DRAWINGS LIGHT VERTICAL AND RIGHT}" in drawn("utf-8")


def run(method: str, tokens: tuple[int, ...], seconds: float) -> Run:
    stats = Stats(
        num_tokens=len(tokens) - 1,
        num_cycles=2,
        num_accepted=2,
        num_refined=1,
        prefill_s=1.0,
        draft_s=seconds,
        verify_s=0.0,
        walk_s=0.0,
        rest_s=0.0,
    )
    return Run(method, "p", Output("p", (1,), "t", tokens, ("prefill",) * len(tokens), "length", 0, stats), None)


def rows(by_method: dict[str, list[Run]]) -> list[list[str]]:
    shown = table(by_method)
    cells = [[str(cell) for cell in column.cells] for column in shown.columns]
    return [[str(column.header) for column in shown.columns], *(list(row) for row in zip(*cells, strict=True))]


def test_the_table_compares_with_plain_decoding() -> None:
    made = {
        "pr": [run("pr", (1, 2, 3, 4, 5), 1.0), run("pr", (1, 2, 3, 4, 6), 1.0)],
        "ar": [run("ar", (1, 2, 3, 4, 5), 2.0), run("ar", (1, 2, 3, 4, 5), 2.0)],
    }
    header, pr, ar = rows(made)
    assert header[-2:] == ["speedup\nvs plain", "identical\nto plain"]
    assert pr == ["pr", "10", "4.0", "2.00", "2.00x", "NO (1 of 2)"]
    assert ar == ["ar", "10", "2.0", "2.00", "1.00x", "yes"]


def test_the_table_compares_with_the_first_method_without_plain_decoding() -> None:
    header, *_ = rows({"pr": [run("pr", (1, 2), 1.0)], "ngram": [run("ngram", (1, 2), 1.0)]})
    assert header[-1] == "identical\nto pr"
    assert len(rows({"pr": [run("pr", (1, 2), 1.0)]})[0]) == 4


def test_an_answer_of_the_prefill_token_alone_has_no_speed() -> None:
    assert rows({m: [run(m, (1,), 0.0)] for m in ("ar", "pr")})[2][2:] == ["0.0", "2.00", "-", "yes"]


def test_totals_add_up() -> None:
    both = total([run("pr", (1, 2, 3), 1.0), run("pr", (1, 2), 0.5)])
    assert (both.num_tokens, both.num_cycles, both.decode_s, both.prefill_s) == (3, 4, 1.5, 2.0)
    assert num_identical([run("pr", (1, 2), 1.0)], [run("ar", (1, 2), 1.0)]) == 1


def test_the_table_fits_60_columns() -> None:
    file = io.StringIO()
    runs = {method: [run(method, tuple(range(290)), 0.5)] for method in ("ar", "eagle3.1", "pr")}
    Console(file=file, width=60).print(table(runs))
    first, *_ = file.getvalue().splitlines()
    assert first.split() == ["acceptance", "speedup", "identical"]
