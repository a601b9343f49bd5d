"""The library's front door: ``LLM(target).generate(prompts, SamplingParams(...))``, also streaming and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.config import TreeConfig
from secondguess.device import choose_device
from secondguess.drafter.opening import Openings
from secondguess.engine.cycle import CycleTrace, Engine, Watcher
from secondguess.engine.guard import Guard
from secondguess.engine.menu import Menu
from secondguess.engine.pump import Listener, Pump
from secondguess.engine.room import check_batch, context_of, room_in_memory, slots_within
from secondguess.engine.scheduler import Load, Scheduler
from secondguess.engine.sequence import Sequence
from secondguess.engine.speculate import Speculator
from secondguess.engine.thread import run, submit
from secondguess.errors import UserError, did_you_mean, require
from secondguess.grammar import Grammars
from secondguess.machine import give_back_memory
from secondguess.methods import WITH_DRAFTER, make_speculator, parse_method
from secondguess.prompts import Prompt, as_chat, as_list, encode
from secondguess.target.hf import HFTarget
from secondguess.target.spread import load_spread
from secondguess.types import AS_USUAL, Delta, Output, Request, SamplingParams, Speculation, Stats, Totals

if TYPE_CHECKING:
    from secondguess.drafter.model import Drafter


class LLM:
    """A target with a way to speculate.

    ``target``: a local folder, a hub id, a ``.gguf`` file, an alias, or a target that is loaded already (several LLMs
    may share it). Under torchrun it is spread over the processes (see ``target.spread``). ``method``: ``ar``,
    ``ngram``, ``eagle3.1``, ``pr``, ``hass`` or ``hass+pr``, with settings if wanted (``pr:m=0``). ``drafter``: a
    folder, the name of one that ships, or one that is loaded already (``methods.open_drafter``), which several LLMs may
    share; by default the one named like the method. Output never depends on the method. ``others``: methods that a
    ``Request`` may ask for instead; then one whose drafter fails is switched off with a warning, and decoding goes on
    without it; and so it does while ``method`` is slower than plain decoding, for requests that ask for nothing else.
    ``max_model_len``: tokens of prompt and answer together; by default all that the target can take, but at most 8192,
    because room for ``max_batch_size`` such requests is set aside. ``kv_cache_tokens``: what may be taken of it, by
    default what memory holds; when texts of more tokens run, the newest goes back to the queue until others have ended.
    On a GPU all room is taken at once, so there only as many requests run together as these tokens are room for.
    ``enable_prefix_caching``: a prompt takes over the K/V of the tokens that it has in common with the beginning of
    another text, if that runs or its slot has not been needed since. ``dtype`` and ``device`` (``auto`` takes a GPU if
    there is one) are for a target that is loaded here; one that is loaded already keeps its own. Python code among the
    target's files is run only with ``trust_remote_code``.

    Raises UserError when something is unknown or does not fit together.
    """

    def __init__(
        self,
        target: str | Path | HFTarget = "smollm2-135m",
        drafter: str | Path | Drafter | None = None,
        *,
        method: str = "pr",
        others: Seq[str] = (),
        tree: TreeConfig | None = None,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        kv_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        dtype: str = "float32",
        device: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        check_batch(max_batch_size)
        if not isinstance(target, HFTarget):
            target = run(load_spread, str(target), dtype, str(choose_device(device)), trust_remote_code)
        self.target = target
        self.method = parse_method(method, tree or TreeConfig())
        same_budget = replace(tree or TreeConfig(), budget=self.method.tree.budget)
        offered = [self.method, *(parse_method(other, same_budget) for other in others)]
        self.methods = {m.name: m for m in reversed(offered)}  # of two with one name the method comes first
        if drafter is not None and not any(m.takes_drafter for m in offered):
            own = "names its own drafter" if self.method.drafter else "uses no drafter"
            raise UserError(f"method {method} {own}: leave drafter out, or take {' or '.join(WITH_DRAFTER)}")
        self.max_model_len = context_of(self.target.spec.context_len, max_model_len, kv_cache_tokens)
        there = self.target.spec.device
        self.max_batch_size = slots_within(max_batch_size, self.max_model_len, kv_cache_tokens, there)
        self.engine = run(self._make_engine, drafter, self.max_batch_size)
        give_back_memory()  # packing weights leaves holes
        self.kv_cache_tokens = kv_cache_tokens or room_in_memory(self.engine.cache, self.max_model_len)
        self._scheduler = Scheduler(
            self.engine, self.max_model_len, self.target.tokenizer, self.kv_cache_tokens, enable_prefix_caching
        )
        self._pump = Pump(self._scheduler.step, self._news, self._scheduler.abort)

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
        sequences = [self._prepare(self.request(p, q)) for p, q in zip(batch, each, strict=True)]
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
        sequence = self._prepare(self.request(prompt, params))
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
        """As ``stream``, for asyncio; concurrent calls are batched, and go on while nobody reads."""
        async with aclosing(self.answer(self.request(prompt, params))) as deltas:
            async for delta in deltas:
                yield delta

    def answer(self, request: Request) -> AsyncGenerator[Delta]:
        """As ``agenerate``, for a whole request. Raises UserError at once if it cannot be decoded."""
        return self._read(self._prepare(request))

    def start(self, requests: Seq[Request], hear: Callable[[int, Delta | Exception], None]) -> Callable[[], None]:
        """Decode requests, whether or not anybody reads them; returns what drops those that have not ended.

        ``hear`` is told, on the engine's thread, which of them has news: what it emitted, or the error that ended it.
        Raises UserError before any of them is begun if one of them cannot be decoded.
        """
        sequences = [self._prepare(request) for request in requests]
        submit(self._begin, sequences, [partial(hear, i) for i in range(len(sequences))])
        return partial(self._abandon, sequences)

    def request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """A prompt as a request."""
        text = prompt if isinstance(prompt, str) else None
        return Request(self.encode(prompt), params or SamplingParams(), text=text)

    def check(self, wish: Speculation) -> None:
        """Raises UserError when a request cannot be drafted for as it wants."""
        if wish == AS_USUAL:
            return
        name, names = wish.method or self.method.name, ", ".join(self.methods)
        require(len(self.methods) > 1, "this LLM offers one method: make it with `others` to let requests choose")
        require(name in self.methods, f"no method {name!r} here{did_you_mean(name, self.methods)}; there are {names}")
        if wish.budget is not None:
            method = self.methods[name]
            require("budget" in method.uses, f"budget is of no use to {name}")
            fits = 1 <= wish.budget <= method.tree.max_budget
            require(fits, f"budget must be in [1, {method.tree.max_budget}], got {wish.budget}")

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids that a prompt is decoded from. The log is told once if a drafter knows no answers like its."""
        ids = encode(self.target.tokenizer, prompt)
        if as_chat(prompt):
            self._openings.hear(ids)
        return ids

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids, special tokens included; nothing without a tokenizer."""
        return str(self.target.tokenizer.decode(list(ids))) if self.target.tokenizer else ""

    @cached_property
    def max_characters(self) -> int:
        """No longer text fits into ``max_model_len`` tokens: each would have to be the longest of the vocabulary."""
        longest = max(map(len, self.target.tokenizer.get_vocab())) if self.target.tokenizer else 0
        return longest * self.max_model_len

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for ``Request.grammar``. Raises UserError if xgrammar is not installed."""
        return Grammars(self.target)

    @property
    def last_trace(self) -> CycleTrace | None:
        """What the newest cycle drafted and accepted; None if a prefill came after it."""
        return self.engine.last

    @property
    def load(self) -> Load:
        """How many requests run and wait, and how much of the K/V cache they use."""
        return self._scheduler.load

    @property
    def totals(self) -> Totals:
        """What all requests so far added up to, after the newest step; not to be changed."""
        return self._scheduler.totals

    @property
    def switched_off(self) -> dict[str, str]:
        """Methods whose drafter failed, and why. Always empty without ``others``."""
        speculator = self.engine.speculator
        return dict(speculator.switched_off) if isinstance(speculator, Menu) else {}

    @property
    def paused(self) -> bool:
        """Whether ``method`` is switched off for now, because plain decoding is faster. Never without ``others``."""
        return isinstance(self.engine.speculator, Menu) and self.engine.speculator.paused

    @contextmanager
    def watched(self, watch: Watcher) -> Generator[None]:
        """Meanwhile, ``watch`` hears of every token as it is chosen, on the engine's thread."""
        self.engine.watch = watch
        try:
            yield
        finally:
            self.engine.watch = None

    def _prepare(self, request: Request) -> Sequence:
        self.check(request.speculation)
        return self._scheduler.prepare(request)

    async def _read(self, sequence: Sequence) -> AsyncGenerator[Delta]:
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Delta | Exception]()

        def tell(news: Delta | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
                loop.call_soon_threadsafe(inbox.put_nowait, news)

        try:
            submit(self._begin, [sequence], [tell])
            done = False
            while not done:
                news = await inbox.get()
                if isinstance(news, Exception):
                    raise news
                yield news
                done = news.output is not None
        finally:
            self._abandon([sequence])

    def _abandon(self, sequences: list[Sequence]) -> None:
        """Does not wait: whatever is asked of the engine's thread next finds the slots free."""
        with suppress(RuntimeError):  # the interpreter is ending, and the engine's thread has
            for s in sequences:
                submit(self._pump.forget, s)
                submit(self._scheduler.abort, s)

    # What follows runs on the engine's thread, where nothing changes under its hands.

    def _begin(self, sequences: Seq[Sequence], listeners: Seq[Listener]) -> None:
        """Queue all of them before any is admitted."""
        for sequence, listener in zip(sequences, listeners, strict=True):
            self._scheduler.submit(sequence)
            self._pump.listen(sequence, listener)

    def _make_engine(self, drafter: str | Path | Drafter | None, num_slots: int) -> Engine:
        columns = self.max_model_len + 1 + max(method.tree.max_budget for method in self.methods.values())
        loaded: dict[Path, Drafter] = {}
        speculators = {
            name: make_speculator(
                method, self.target, drafter if method.takes_drafter else None, num_slots, columns, loaded
            )
            for name, method in self.methods.items()
        }
        networks = [*loaded.values(), *([] if isinstance(drafter, str | Path | None) else [drafter])]
        self._openings = Openings(self.target.tokenizer, (network.answer_start for network in networks))
        return Engine(self.target, self._choose_among(speculators), self.target.new_cache(num_slots, columns))

    def _choose_among(self, speculators: dict[str, Speculator]) -> Speculator:
        """The only one, or for each request the one that it wants."""
        name = self.method.name
        default = speculators[name]
        if len(speculators) == 1:
            return default
        fixed = self.method.has_drafter and self.method.tree.budget != "auto"  # auto stops by itself where it loses
        return Menu({**speculators, name: Guard(name, default) if fixed else default}, name)

    def _advance(self, s: Sequence) -> Delta | None:
        """What the request emitted since it was last asked, after a step if that is nothing; None if it still is."""
        if not s.finish_reason and not s.has_news:
            self._scheduler.step()
        return self._news(s)

    def _news(self, s: Sequence) -> Delta | None:
        """What the request emitted since it was last asked; None if that is nothing."""
        if not s.finish_reason and not s.has_news:
            return None
        tokens, origins, logprobs = s.new_tokens()
        output = self._output(s) if s.finish_reason else None
        return Delta(tokens, origins, s.new_text(), s.finish_reason, output, logprobs, s.new_traces())

    def _output(self, s: Sequence) -> Output:
        assert s.finish_reason is not None
        t = s.timing
        return Output(
            given=s.request.text,
            prompt_ids=s.request.prompt_ids,
            text=s.stream.text,
            token_ids=tuple(s.emitted),
            origins=tuple(s.origins),
            finish_reason=s.finish_reason,
            seed=s.seed,
            stats=Stats(
                num_tokens=len(s.origins) - 1,
                num_cycles=s.drafting.num_cycles,
                num_accepted=s.drafting.num_accepted,
                num_refined=s.drafting.num_accepted_refined,
                num_drafted=s.drafting.num_drafted,
                num_steps=s.drafting.num_steps,
                prefill_s=t.prefill,
                draft_s=t.draft,
                verify_s=t.verify,
                walk_s=t.walk,
                rest_s=t.rest,
                queue_s=t.queue,
                num_reused=s.num_reused,
            ),
            drafting=s.drafting,
            logprobs=tuple(s.logprobs),
            prompt_logprobs=tuple(s.prompt_logprobs),
            tokenizer=self.target.tokenizer,
        )
