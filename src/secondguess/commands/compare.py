"""Methods side by side: one target, one LLM per method, answers that stream."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from secondguess.commands.show_table import Run
from secondguess.commands.show_text import Painter, Writer, census
from secondguess.config import TreeConfig
from secondguess.device import choose_device
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.methods import parse_method
from secondguess.prompts import Chat, Message, encode
from secondguess.target.hf import HFTarget
from secondguess.target.spread import is_follower, load_spread
from secondguess.types import SamplingParams


def stdout_console() -> Console:
    """Standard output, where a character that the terminal's encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def load(name: str, dtype: str = "float32", device: str = "auto", trust_remote_code: bool = False) -> HFTarget:
    """Load a target; a terminal shows meanwhile what is done."""
    with Console(stderr=True, quiet=is_follower()).status(Text(f"loading {name}")) as status:
        where = str(choose_device(device))
        return run(load_spread, name, dtype, where, trust_remote_code, lambda message: status.update(Text(message)))


def make_llms(
    target: HFTarget, methods: Sequence[str], tree: TreeConfig, max_len: int, drafter: Path | str | None = None
) -> dict[str, LLM]:
    """One LLM per method over one target, each for one request of ``max_len`` tokens at a time, and warmed up."""
    max_len = min(max(max_len, 2), target.spec.context_len)
    room = {"max_batch_size": 1, "max_model_len": max_len, "enable_prefix_caching": False}
    llms = {}
    for method in methods:
        given = drafter if parse_method(method, tree).takes_drafter else None
        llms[method] = LLM(target, given, method=method, tree=tree, **room)
    for llm in llms.values():  # so that the first method is not charged for what torch does once
        llm.generate([0], SamplingParams(max_tokens=8, ignore_eos=True))
    return llms


def prompt_ids(
    target: HFTarget, prompt: str | list[Message], raw: bool = False, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """The prompt, or a whole conversation, in the chat template, or as plain text if ``raw`` or without a template.

    ``variables``: what the chat template is given besides.

    Raises UserError if it leaves no room for an answer.
    """
    assert target.tokenizer, "targets that are loaded by name have one"
    chat = not raw and target.tokenizer.chat_template
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = Chat(messages, variables=variables or {}) if chat else "\n".join(m["content"] for m in messages)
    ids = list(encode(target.tokenizer, asked))
    if len(ids) >= target.spec.context_len:
        raise UserError(f"a prompt has {len(ids)} tokens, the context holds {target.spec.context_len}: shorten it")
    return ids


def stream(console: Console, llm: LLM, prompt: str, ids: list[int], params: SamplingParams) -> Run:
    """Decode, printing the answer as it comes under the method's name."""
    method = llm.method.typed
    title = Text("ar (plain decoding)" if method == "ar" else method)
    painter, writer = Painter(llm.target.tokenizer), Writer(console)
    console.print(Rule(title, align="left", style="dim"))
    output = None
    for delta in llm.stream(ids, params):
        writer.write(painter.paint(delta))
        output = delta.output
    assert output is not None, "the last delta brings the output"
    speed = (f"{output.stats.tokens_per_second:.1f} tokens/s  ", "bold")
    cut = "  stopped at the token limit" if output.finish_reason == "length" else ""
    console.print("\n", Text.assemble(speed, census(output.origins), cut), "\n", sep="")
    return Run(method, prompt, output, llm.last_trace)
