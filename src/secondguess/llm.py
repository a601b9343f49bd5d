"""The library's front door: ``LLM(target).generate(prompts, SamplingParams(...))``, also streaming and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from secondguess.config import TreeConfig
from secondguess.engine.cycle import Engine
from secondguess.engine.scheduler import Scheduler
from secondguess.engine.sequence import Sequence
from secondguess.errors import UserError
from secondguess.methods import make_speculator, parse_method
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.types import Delta, Output, Request, SamplingParams, Stats

T = TypeVar("T")
Prompt = str | Seq[int]  # text, or token ids


class LLM:
    """A target with a way to speculate.

    ``target``: a local folder, a hub id, a ``.gguf`` file, an alias, or a target that is loaded already (several LLMs
    may share it). ``method``: ``ar``, ``ngram``, ``eagle3.1`` or ``pr``, with settings if wanted (``pr:m=0``).
    ``drafter``: a folder or the name of one that ships; by default the one named like the method. Output never depends
    on the method.

    Raises UserError when something is unknown or does not fit together.
    """

    def __init__(
        self,
        target: str | Path | HFTarget = "smollm2-135m",
        drafter: str | Path | None = None,
        *,
        method: str = "pr",
        tree: TreeConfig | None = None,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        if max_batch_size < 1:
            raise UserError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.target = target if isinstance(target, HFTarget) else load_target(str(target), dtype, device)
        self.method = parse_method(method, tree or TreeConfig())
        self.max_model_len = self._context(max_model_len)
        columns = self.max_model_len + 1 + self.method.tree.budget
        speculator = make_speculator(self.method, self.target, drafter, max_batch_size, columns)
        self.engine = Engine(self.target, speculator, self.target.new_cache(max_batch_size, columns))
        self._scheduler = Scheduler(self.engine, self.max_model_len, self.target.tokenizer)
        # One thread owns the engine, so that sync, streaming and async callers can share it.
        self._thread = ThreadPoolExecutor(1, "secondguess-engine")

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Output]:
        """Continue all prompts, batched; one Output per prompt, in order. ``params``: one for all, or one each."""
        batch = as_list(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Seq) else list(params)
        if len(each) != len(batch):
            raise UserError(f"{len(batch)} prompts but {len(each)} sampling params: give one for all or one each")
        requests = [self.request(p, q) for p, q in zip(batch, each, strict=True)]
        sequences = self._call(lambda: [self._scheduler.add(request) for request in requests])
        try:
            while not all(s.finish_reason for s in sequences):
                self._call(self._scheduler.step)
        finally:
            self._call(lambda: [self._scheduler.abort(s) for s in sequences if not s.finish_reason])
        return [self._output(s) for s in sequences]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """Continue one prompt; yields what each cycle accepted. Closing the iterator drops the request."""
        request = self.request(prompt, params or SamplingParams())
        sequence = self._call(lambda: self._scheduler.add(request))
        try:
            while not sequence.finish_reason:
                self._call(self._scheduler.step)
                if len(sequence.origins) > sequence.streamed_tokens:
                    yield self._delta(sequence)
        finally:
            if not sequence.finish_reason:
                self._call(lambda: self._scheduler.abort(sequence))

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Delta]:
        """As ``stream``, for asyncio; concurrent calls are batched."""
        request, loop = self.request(prompt, params or SamplingParams()), asyncio.get_running_loop()
        sequence = await loop.run_in_executor(self._thread, self._scheduler.add, request)
        try:
            while not sequence.finish_reason:
                await loop.run_in_executor(self._thread, self._scheduler.step)
                if len(sequence.origins) > sequence.streamed_tokens:
                    yield self._delta(sequence)
        finally:
            if not sequence.finish_reason:
                self._thread.submit(self._scheduler.abort, sequence)

    def chat_prompt(self, messages: Seq[dict[str, Any]]) -> str:
        """The text that the model's chat template makes of ``messages`` ({"role", "content"}), ready to be answered."""
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise UserError("this target has no chat template: give raw text instead")
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    def request(self, prompt: Prompt, params: SamplingParams, choice: int = 0) -> Request:
        """A prompt as token ids. A string is tokenised as it stands: chat templates write their own special tokens."""
        if isinstance(prompt, str):
            templated = bool(self._tokenizer().chat_template)
            ids = self._tokenizer().encode(prompt, add_special_tokens=not templated)
        else:
            ids = list(prompt)
        return Request(tuple(ids), params, choice)

    def _tokenizer(self):
        if self.target.tokenizer is None:
            raise UserError("this target has no tokenizer: give prompts as token ids")
        return self.target.tokenizer

    def _context(self, wanted: int | None) -> int:
        limit = self.target.spec.context_len
        if wanted is not None and not 1 < wanted <= limit:
            raise UserError(f"max_model_len must be in [2, {limit}] for this target, got {wanted}")
        return wanted or limit

    def _call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def _delta(self, s: Sequence) -> Delta:
        seen, s.streamed_tokens = s.streamed_tokens, len(s.origins)
        done = self._output(s) if s.finish_reason else None
        return Delta(tuple(s.emitted[seen:]), tuple(s.origins[seen:]), s.new_text(), s.finish_reason, done)

    def _output(self, s: Sequence) -> Output:
        s.stream.flush()
        assert s.finish_reason is not None
        prompt_ids, t = s.request.prompt_ids, s.timing
        prompt = self.target.tokenizer.decode(prompt_ids) if self.target.tokenizer else ""
        return Output(
            prompt=prompt,
            prompt_ids=prompt_ids,
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


def as_list(prompts: Any) -> list[Prompt]:
    """A string or a flat list of token ids is one prompt, anything else a list of them."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)
