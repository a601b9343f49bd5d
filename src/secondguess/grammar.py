"""Grammars for answers (JSON, JSON schemas, regular expressions) by xgrammar, which is an extra.

V vocabulary, W words of 32 bits that hold a bit for each token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from secondguess.errors import UserError, install
from secondguess.target.hf import HFTarget

CACHE_BYTES = 64 * 2**20
log = logging.getLogger(__name__)


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


class CompiledGrammar:
    """A ``Grammar``; see ``secondguess.engine.grammar``."""

    def __init__(self, xgrammar: ModuleType, compiled: Any, vocab_size: int) -> None:
        self.xgrammar, self.compiled, self.vocab_size = xgrammar, compiled, vocab_size

    def start(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """A ``Follower``."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher = grammar.xgrammar.GrammarMatcher(grammar.compiled)
        self.vocab_size = grammar.vocab_size
        self.bits_1W = grammar.xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
        self.ended = self.failed = False

    def allowed(self) -> Tensor | None:
        if self.ended or self.failed:
            return None
        try:
            self.matcher.fill_next_token_bitmask(self.bits_1W)
        except RuntimeError as error:
            self._fail(error)
            return None
        bits_W32 = self.bits_1W[0, :, None] >> torch.arange(32)
        return (bits_W32 & 1).flatten()[: self.vocab_size] == 1

    def accept(self, token: int) -> None:
        if self.ended or self.failed:
            return
        try:
            self.failed = not self.matcher.accept_token(token)
            self.ended = self.matcher.is_terminated()
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        """Such as nesting that is too deep."""
        log.warning("a text cannot follow its grammar any further: %s", error)
        self.failed = True


def import_xgrammar() -> ModuleType:
    try:
        import xgrammar
    except ModuleNotFoundError as error:
        raise UserError(f"grammars need xgrammar here: {install('grammar')}") from error
    return xgrammar
