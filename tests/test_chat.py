"""``secondguess chat``: piped lines and a terminal's, commands, and what is said of mistakes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch

from secondguess import LLM, SamplingParams
from secondguess.cli import main
from secondguess.commands import chat_talk
from secondguess.commands.compare import prompt_ids
from secondguess.target.load import load_target
from tiny_folder import save_tiny

FLAGS = ("--max-new-tokens=16", "--ignore-eos", "--budget=6", "--num-steps=3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(tiny: Path, monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, *more: str) -> int:
    monkeypatch.setattr(sys, "stdin", stdin)
    return main(["chat", str(tiny / "target"), f"--drafter={tiny}/drafters/pr", *FLAGS, *more])


def piped(*lines: str) -> io.StringIO:
    return io.StringIO("".join(f"{line}\n" for line in lines))


def expected(tiny: Path, *turns: str) -> list[str]:
    """Plain decoding's answers to a conversation."""
    target = load_target(str(tiny / "target"))
    llm, messages, answers = LLM(target, method="ar"), [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        answers.append(llm.generate([prompt_ids(target, messages)], params)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_piped_lines_are_a_conversation(tiny: Path, monkeypatch, capsys) -> None:
    assert talk(tiny, monkeypatch, piped("hello", "", "and then")) == 0
    out = capsys.readouterr().out
    first, second = expected(tiny, "hello", "and then")
    assert out.index(first) < out.index(second, out.index(first) + len(first))
    assert out.count(" tokens/s  tau ") == 2
    assert ">" not in out.replace(first, "").replace(second, ""), "no prompt where nobody types"


def test_a_conversation_can_begin_anew(tiny: Path, monkeypatch, capsys) -> None:
    assert talk(tiny, monkeypatch, piped("hello", "/reset", "other", "/quit", "never")) == 0
    out = capsys.readouterr().out
    assert expected(tiny, "other")[0] in out
    assert out.count(" tokens/s ") == 2


def test_methods_are_chosen_and_write_the_same(tiny: Path, monkeypatch, capsys) -> None:
    lines = ("hello", "/method ar", "/reset", "hello", "/method ngram", "/reset", "hello", "/method")
    assert talk(tiny, monkeypatch, piped(*lines)) == 0
    out = capsys.readouterr().out
    assert out.count(expected(tiny, "hello")[0]) == 3
    assert "ar guesses; there are also eagle3.1, ngram, pr" in out
    assert out.count("tau 1.00  level 0: 0  refined: 0  bonus: 16") >= 1


@pytest.mark.parametrize("flags", [(), ("--temperature=1",)])
def test_a_race_of_all_methods(tiny: Path, monkeypatch, capsys, flags: tuple[str, ...]) -> None:
    assert talk(tiny, monkeypatch, piped("/race hello", "other"), *flags) == 0
    out = capsys.readouterr().out
    for method in ("ar", "pr", "ngram", "eagle3.1"):
        assert re.search(rf"^{re.escape(method)} +16 .* yes *$", out, re.M), method
    if not flags:
        assert out.count(expected(tiny, "hello")[0]) == 4
        assert expected(tiny, "other")[0] in out, "the conversation goes on without the race"


def test_auto_is_a_budget_for_all_that_have_a_drafter(tiny: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tiny / "cache"))
    assert talk(tiny, monkeypatch, piped("hello", "/method ngram", "/reset", "hello"), "--budget=auto") == 0
    assert capsys.readouterr().out.count(expected(tiny, "hello")[0]) == 2


def test_trees_are_drawn(tiny: Path, monkeypatch, capsys) -> None:
    assert talk(tiny, monkeypatch, piped("hello", "/tree 1", "/tree")) == 0
    out = capsys.readouterr().out
    assert "cycle 1 of " in out
    assert out.count("newest token") == len(re.findall(" bonus *\n", out)) == 2
    assert "% " in out


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("/tre",), "no command /tre; did you mean tree? (/help lists them)"),
        (("/tree",), "there was no cycle yet: ask something first"),
        (("hello", "/tree 0"), "the last answer has cycles 1 to"),
        (("hello", "/tree x"), "not 'x'"),
        (("/method ar", "hello", "/tree"), "ar has no drafter"),
        (("/method prr",), "no method 'prr' here; did you mean pr?"),
        (("/race",), "nothing to race about: /race QUESTION"),
        (("x" * 2000,), "shorten it"),
    ],
)
def test_a_mistake_ends_piped_input_and_not_a_terminals(tiny: Path, monkeypatch, capsys, lines, said: str) -> None:
    assert talk(tiny, monkeypatch, piped(*lines)) == 2
    assert said in capsys.readouterr().err
    stdin = Terminal("".join(f"{line}\n" for line in (*lines, "still here")))
    assert talk(tiny, monkeypatch, stdin) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(said.split()) in out
    assert " tokens/s tau " in out, "the last line is answered"


def test_a_terminal_has_a_prompt_and_help(tiny: Path, monkeypatch, capsys) -> None:
    assert talk(tiny, monkeypatch, Terminal("/help\n")) == 0
    out = capsys.readouterr().out
    assert "pr guesses; /help lists the commands" in out
    assert out.count("> ") == 2
    assert all(f"/{command}" in out for command in chat_talk.HELP)
    assert "level 0, the drafter at first sight" in out


def test_an_answer_that_is_interrupted_has_been_said_as_far_as_it_came(tiny: Path, monkeypatch, capsys) -> None:
    stream, asked = chat_talk.Talk._stream, []

    async def interrupted(self, request, said):
        asked.append(request.prompt_ids)
        if len(asked) == 1:
            said.append("half an ans")
            raise KeyboardInterrupt
        return await stream(self, request, said)

    monkeypatch.setattr(chat_talk.Talk, "_stream", interrupted)
    assert talk(tiny, monkeypatch, piped("hello", "go on")) == 0
    assert "stopped" in capsys.readouterr().out
    assert load_target(str(tiny / "target")).tokenizer.decode(list(asked[1])) == "hello\nhalf an ans\ngo on\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said(tiny: Path, monkeypatch, capsys) -> None:
    assert main(["chat", "target", "--device", "cuda"]) == 2
    assert "cuda" in capsys.readouterr().err
