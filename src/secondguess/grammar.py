"""Grammars for answers (JSON, JSON schemas, regular expressions) by xgrammar, which is an extra.

V vocabulary, W words of 32 bits that hold a bit for each token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import UserError, install
from secondguess.target.hf import HFTarget

CACHE_BYTES = 64 * 2**20
SLOW_S = 0.05  # of the thread's own time, which a busy machine does not lengthen; most grammars take below 0.001
MAX_SLOW = 2  # times in a row that a token may take so long; one alone may take as much at once


class Grammars:
    """Compiles grammars for one target. Raises UserError without xgrammar, or if the target cannot have any."""

    def __init__(self, target: HFTarget) -> None:
        if target.tokenizer is None or not target.spec.eos_token_ids:
            raise UserError("this target has no tokenizer or no end token: its answers cannot follow a grammar")
        self.xgrammar, self.vocab_size = import_xgrammar(), target.spec.vocab_size
        info = self.xgrammar.TokenizerInfo.from_huggingface(
            target.tokenizer, vocab_size=self.vocab_size, stop_token_ids=sorted(target.spec.eos_token_ids)
        )
        # One thread, because the cores belong to the engine; and callers may send new schemas for ever.
        self.compiler = self.xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def json(self, schema: dict[str, Any] | None = None) -> CompiledGrammar:
        """Any JSON object, or what fits the schema. Raises UserError if the schema is none."""
        if schema is None:
            return self._compile("JSON", self.compiler.compile_builtin_json_grammar)
        return self._compile("JSON schema", lambda: self.compiler.compile_json_schema(json.dumps(schema)))

    def regex(self, pattern: str) -> CompiledGrammar:
        """Texts that the whole expression fits. Raises UserError if it is none."""
        return self._compile("regular expression", lambda: self.compiler.compile_regex(pattern))

    def _compile(self, what: str, compile_it: Callable[[], Any]) -> CompiledGrammar:
        try:
            return CompiledGrammar(self.xgrammar, compile_it(), self.vocab_size)
        except Exception as error:  # the compiler's own errors have no common type
            raise UserError(f"this {what} cannot be used: {str(error).splitlines()[-1]}") from error


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A ``Grammar``; see ``secondguess.engine.grammar``."""

    xgrammar: ModuleType
    compiled: Any
    vocab_size: int
    field: str | None = None  # of the request that it came with

    def start(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """A ``Follower``."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher = grammar.xgrammar.GrammarMatcher(grammar.compiled)
        self.vocab_size, self.field = grammar.vocab_size, grammar.field
        self.bits_1W = grammar.xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
        self.ended = False
        self.fault: Exception | None = None
        self.token_s = 0.0  # what the newest token has taken
        self.slow_s = 0.0  # what the slow tokens before it took, as far as they are in a row

    def allowed(self) -> Tensor | None:
        if self.ended or self.fault:
            return None
        with self._watched():
            self.matcher.fill_next_token_bitmask(self.bits_1W)
        if self.fault:
            return None
        bits_W32 = self.bits_1W[0, :, None] >> torch.arange(32)
        return (bits_W32 & 1).flatten()[: self.vocab_size] == 1

    def accept(self, token: int) -> None:
        if self.ended or self.fault:
            return
        with self._watched():
            if not self.matcher.accept_token(token):
                self.fault = RuntimeError(f"a grammar was given token {token}, which it had not allowed")
            self.ended = self.matcher.is_terminated()
        self.slow_s = self.slow_s + self.token_s if self.token_s > SLOW_S else 0.0
        self.token_s = 0.0

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """All others wait meanwhile, so an error or too much time is the end of the text, and of no other."""
        start = thread_time()
        try:
            yield
        except RuntimeError as error:  # such as nesting that is too deep
            self.fault = UserError(f"the answer cannot follow its grammar any further: {error}", self.field)
        self.token_s += thread_time() - start
        if self.slow_s + self.token_s > MAX_SLOW * SLOW_S and not self.ended:
            self.fault = UserError(TOO_SLOW, self.field)


TOO_SLOW = (
    f"this grammar takes more than {1000 * SLOW_S:.0f} ms for each token of this answer: make it simpler, above all"
    " repetitions within repetitions"
)


def import_xgrammar() -> ModuleType:
    try:
        import xgrammar
    except ModuleNotFoundError as error:
        raise UserError(f"grammars need xgrammar here: {install('grammar')}") from error
    return xgrammar
