"""The library's front door: ``LLM(target).generate(prompts, SamplingParams(...))``, also streaming and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.config import TreeConfig
from secondguess.engine.cycle import CycleTrace, Engine, Watcher
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.sequence import Sequence
from secondguess.engine.thread import EXECUTOR, run, submit
from secondguess.errors import UserError
from secondguess.methods import WITH_DRAFTER, make_speculator, parse_method
from secondguess.prompts import Prompt, as_list, encode
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.types import Delta, Output, Request, SamplingParams, Stats

if TYPE_CHECKING:
    from secondguess.drafter.model import Drafter

DEFAULT_CONTEXT = 8192


class LLM:
    """A target with a way to speculate.

    ``target``: a local folder, a hub id, a ``.gguf`` file, an alias, or a target that is loaded already (several LLMs
    may share it). ``method``: ``ar``, ``ngram``, ``eagle3.1`` or ``pr``, with settings if wanted (``pr:m=0``).
    ``drafter``: a folder, the name of one that ships, or one that is loaded already (``methods.open_drafter``), which
    several LLMs may share; by default the one named like the method. Output never depends on the method.
    ``max_model_len``: tokens of prompt and answer together; by default all that the target can take, but at most 8192,
    because room for ``max_batch_size`` such requests is allocated at once. ``dtype`` and ``device`` are for a target
    that is loaded here; one that is loaded already keeps its own.

    Raises UserError when something is unknown or does not fit together.
    """

    def __init__(
        self,
        target: str | Path | HFTarget = "smollm2-135m",
        drafter: str | Path | Drafter | None = None,
        *,
        method: str = "pr",
        tree: TreeConfig | None = None,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        if not isinstance(max_batch_size, int) or max_batch_size < 1:
            raise UserError(f"max_batch_size must be a whole number, at least 1, got {max_batch_size!r}")
        self.target = target if isinstance(target, HFTarget) else run(load_target, str(target), dtype, device)
        self.method = parse_method(method, tree or TreeConfig())
        if drafter is not None and not self.method.has_drafter:
            raise UserError(f"method {method} uses no drafter: leave drafter out, or take {' or '.join(WITH_DRAFTER)}")
        self.max_model_len = self._context(max_model_len)
        self.engine = run(self._make_engine, drafter, max_batch_size)
        self._scheduler = Scheduler(self.engine, self.max_model_len, self.target.tokenizer)

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Output]:
        """Continue all prompts, batched; one Output per prompt, in order. ``params``: one for all, or one each.

        A prompt is raw text, token ids, or messages ({"role", "content"}) for the model's chat template. Raises
        UserError before anything is decoded if one of them cannot be.
        """
        batch = as_list(prompts)
        if not isinstance(params, SamplingParams | Seq | None):
            raise UserError(f"params must be SamplingParams, or a list with one for each prompt, got {params!r}")
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Seq) else list(params)
        if len(each) != len(batch):
            raise UserError(f"{len(batch)} prompts but {len(each)} sampling params: give one for all or one each")
        sequences = [self._prepare(p, q) for p, q in zip(batch, each, strict=True)]
        try:
            for s in sequences:
                submit(self._scheduler.submit, s)
            while not all(s.finish_reason for s in sequences):
                run(self._scheduler.step)
            return run(lambda: [self._output(s) for s in sequences])
        finally:
            self._abandon(sequences)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """Continue one prompt; yields what was accepted since the last delta. Closing the iterator drops the request.

        Other requests move on meanwhile, so a slow reader gets longer deltas. The last one has the Output.
        """
        sequence = self._prepare(prompt, params or SamplingParams())
        try:
            submit(self._scheduler.submit, sequence)
            done = False
            while not done:
                if delta := run(self._advance, sequence):
                    yield delta
                    done = delta.output is not None
        finally:
            self._abandon([sequence])

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Delta]:
        """As ``stream``, for asyncio; concurrent calls are batched."""
        sequence, loop = self._prepare(prompt, params or SamplingParams()), asyncio.get_running_loop()
        try:
            submit(self._scheduler.submit, sequence)
            done = False
            while not done:
                if delta := await loop.run_in_executor(EXECUTOR, self._advance, sequence):
                    yield delta
                    done = delta.output is not None
        finally:
            self._abandon([sequence])

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids that a prompt is decoded from."""
        return encode(self.target.tokenizer, prompt)

    @property
    def last_trace(self) -> CycleTrace | None:
        """What the newest cycle drafted and accepted; None if a prefill came after it."""
        return self.engine.last

    @contextmanager
    def watched(self, watch: Watcher) -> Generator[None]:
        """Meanwhile, ``watch`` hears of every token as it is chosen, on the engine's thread."""
        self.engine.watch = watch
        try:
            yield
        finally:
            self.engine.watch = None

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        text = prompt if isinstance(prompt, str) else None
        return self._scheduler.prepare(Request(self.encode(prompt), params, text=text))

    def _context(self, wanted: int | None) -> int:
        limit = self.target.spec.context_len
        if wanted is not None and not (isinstance(wanted, int) and 1 < wanted <= limit):
            raise UserError(f"max_model_len must be a whole number in [2, {limit}] for this target, got {wanted!r}")
        return wanted or min(limit, DEFAULT_CONTEXT)

    def _abandon(self, sequences: list[Sequence]) -> None:
        """Does not wait: whatever is asked of the engine's thread next finds the slots free."""
        with suppress(RuntimeError):  # the interpreter is ending, and the engine's thread has
            for s in sequences:
                submit(self._scheduler.abort, s)

    # What follows runs on the engine's thread, where nothing changes under its hands.

    def _make_engine(self, drafter: str | Path | Drafter | None, num_slots: int) -> Engine:
        columns = self.max_model_len + 1 + self.method.tree.budget
        speculator = make_speculator(self.method, self.target, drafter, num_slots, columns)
        return Engine(self.target, speculator, self.target.new_cache(num_slots, columns))

    def _advance(self, s: Sequence) -> Delta | None:
        """What the request emitted since it was last asked, after a step if that is nothing; None if it still is."""
        if not s.finish_reason and not s.has_news:
            self._scheduler.step()
        if not s.finish_reason and not s.has_news:
            return None
        tokens, origins = s.new_tokens()
        return Delta(tokens, origins, s.new_text(), s.finish_reason, self._output(s) if s.finish_reason else None)

    def _output(self, s: Sequence) -> Output:
        assert s.finish_reason is not None
        tokenizer, prompt, t = self.target.tokenizer, s.request.text, s.timing
        if prompt is None:
            prompt = str(tokenizer.decode(s.request.prompt_ids)) if tokenizer else ""
        return Output(
            prompt=prompt,
            prompt_ids=s.request.prompt_ids,
            text=s.stream.text,
            token_ids=tuple(s.emitted),
            origins=tuple(s.origins),
            finish_reason=s.finish_reason,
            seed=s.seed,
            stats=Stats(
                num_tokens=len(s.origins) - 1,
                num_cycles=s.num_cycles,
                num_accepted=s.num_accepted,
                num_refined=s.num_refined,
                prefill_s=t.prefill,
                draft_s=t.draft,
                verify_s=t.verify,
                walk_s=t.walk,
                rest_s=t.rest,
            ),
        )
