"""What ``secondguess chat`` runs: lines in, answers and commands out."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from importlib import import_module

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from secondguess.commands.compare import prompt_ids
from secondguess.commands.show_table import Run, table
from secondguess.commands.show_text import Painter, Writer, census, legend
from secondguess.commands.show_tree import KEY, draw_tree
from secondguess.engine.cycle import CycleTrace
from secondguess.errors import UserError, did_you_mean, require
from secondguess.llm import LLM
from secondguess.methods import WITH_DRAFTER
from secondguess.prompts import Message
from secondguess.types import Output, Request, SamplingParams, Speculation

HELP = {
    "help": "this list, and what the colours mean",
    "method [NAME]": "who guesses from now on; without a name, who can",
    "race QUESTION": "all of them answer it, one after the other; then the conversation goes on without it",
    "tree [N]": "the draft tree of the last answer's cycle N, by default of its last",
    "reset": "forget what was said",
    "quit": "leave; so does the end of the input",
}


class Talk:
    """A conversation, who guesses for it, and the cycles of its last answer."""

    def __init__(self, llm: LLM, params: SamplingParams, console: Console) -> None:
        self.llm, self.params, self.console = llm, params, console
        self.method = self.last_method = llm.method.name
        self.messages: list[Message] = []
        self.cycles: list[CycleTrace] = []

    def answer(self, question: str) -> None:
        """Print the answer as it comes. Ctrl-C ends it; what was said until then counts as said."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        request = replace(self._request(asked), speculation=Speculation(self.method), traced=True)
        self.cycles, self.last_method, said = [], self.method, []
        try:
            note = figures(asyncio.run(self._stream(request, said)))
        except KeyboardInterrupt:
            note = Text("stopped")
        self.console.print("\n", note, "\n", sep="")
        self.console.file.flush()
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def obey(self, line: str) -> None:
        """Do what a line after its slash says. Raises UserError when there is no such command, EOFError to leave."""
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "method": self._choose,
            "race": self._race,
            "tree": self._draw,
            "reset": self._forget,
            "quit": self._leave,
        }
        require(name in commands, f"no command /{name}{did_you_mean(name, commands)} (/help lists them)")
        commands[name](argument.strip())

    def _request(self, asked: list[Message]) -> Request:
        return Request(tuple(prompt_ids(self.llm.target, asked)), self.params)

    async def _stream(self, request: Request, said: list[str]) -> Output:
        painter, writer, output = Painter(self.llm.target.tokenizer), Writer(self.console), None
        async with aclosing(self.llm.answer(request)) as deltas:
            async for delta in deltas:
                writer.write(painter.paint(delta))
                said.append(delta.text)
                self.cycles += delta.cycles
                output = delta.output
        assert output is not None, "the last delta brings the output"
        return output

    def _help(self, _: str) -> None:
        for command, meaning in HELP.items():
            self.console.print(f"/{command:<14} {meaning}", markup=False)
        self.console.print(legend())

    def _choose(self, name: str) -> None:
        if name:
            self.llm.check(Speculation(name))
            self.method = name
        rest = ", ".join(other for other in self.llm.methods if other != self.method)
        self.console.print(f"{self.method} guesses; there are also {rest}", markup=False)

    def _race(self, question: str) -> None:
        """The page's, where they run one after the other, too: none slows another down."""
        require(bool(question), "nothing to race about: /race QUESTION")
        request, runs = self._request([*self.messages, {"role": "user", "content": question}]), dict[str, list[Run]]()
        seed = secrets.randbits(32) if self.params.seed is None else self.params.seed  # one for all
        request = replace(request, params=replace(self.params, seed=seed))
        with suppress(KeyboardInterrupt):
            for name in sorted(self.llm.methods, key=lambda name: name != "ar"):
                self.console.print(Rule(Text(name), align="left", style="dim"))
                output = asyncio.run(self._stream(replace(request, speculation=Speculation(name)), []))
                runs[name] = [Run(name, question, output, None)]
                self.console.print("\n")
        self.console.print(table(runs) if runs else "stopped")

    def _draw(self, number: str) -> None:
        require(bool(self.cycles), "there was no cycle yet: ask something first")
        drawn = self.last_method in WITH_DRAFTER
        require(drawn, f"{self.last_method} has no drafter: take another /method, and ask again")
        count = len(self.cycles)
        known = not number or (number.isdecimal() and 1 <= int(number) <= count)
        require(known, f"the last answer has cycles 1 to {count}, not {number!r}")
        tokenizer, cycle = self.llm.target.tokenizer, int(number or count)
        assert tokenizer is not None, "targets that are loaded by name have one"
        self.console.print(f"cycle {cycle} of {count}: {KEY}", markup=False)
        self.console.print(draw_tree(self.cycles[cycle - 1], lambda token: str(tokenizer.decode([token]))))

    def _forget(self, _: str) -> None:
        self.messages, self.cycles = [], []
        self.console.print("forgotten")

    def _leave(self, _: str) -> None:
        raise EOFError


def converse(talk: Talk) -> None:
    """Until the input ends. A mistake ends it too, with its UserError, unless somebody is there to read of it."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        talk.console.print(f"{talk.method} guesses; /help lists the commands", style="dim", markup=False)
    with suppress(EOFError):
        for line in lines(is_terminal):
            try:
                if line.startswith("/"):
                    talk.obey(line[1:])
                elif line.strip():
                    talk.answer(line)
            except UserError as error:
                if not is_terminal:
                    raise
                talk.console.print(str(error), style="red", markup=False)


def lines(is_terminal: bool) -> Iterator[str]:
    """Raises EOFError where a terminal's input ends."""
    if not is_terminal:
        yield from (line.removesuffix("\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # not everywhere; where it is, arrow keys edit the line and bring back earlier ones
        import_module("readline")
    while True:
        yield input("> ")


def figures(output: Output) -> Text:
    stats = output.stats
    return Text.assemble(
        (f"{stats.tokens_per_second:.1f} tokens/s  ", "bold"),
        f"tau {stats.acceptance_length:.2f}  ",
        census(output.origins),
        "  stopped at the token limit" if output.finish_reason == "length" else "",
    )
