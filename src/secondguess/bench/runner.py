"""Runs every method over every prompt, in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from time import perf_counter

from secondguess.bench.audit import Audit, Job, audit
from secondguess.bench.peers.process import Peer
from secondguess.bench.plan import Group, prompt_seed, shape
from secondguess.bench.result import Key, Result
from secondguess.bench.store import Store
from secondguess.llm import LLM
from secondguess.methods import Method
from secondguess.types import SamplingParams

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Bench:
    """What is run. ``llms``: one per method, plain decoding first; they share the target."""

    llms: Mapping[Method, LLM]
    groups: Sequence[Group]
    batch_size: int
    temperatures: Sequence[float]
    max_new_tokens: int
    seed: int
    num_rounds: int = 1
    peers: Mapping[Method, Peer] = field(default_factory=dict)

    @property
    def num_results(self) -> int:
        return sum(len(keys(*turn)) for turn in turns(self))

    def close(self) -> None:
        """End the peers' processes."""
        for peer in self.peers.values():
            peer.close()

    def methods(self, temperature: float) -> list[Method]:
        """Who takes part: peers are greedy."""
        return [*self.llms, *(self.peers if temperature == 0 else ())]

    def decoder(self, method: Method) -> LLM | Peer:
        return self.llms[method] if method in self.llms else self.peers[method]

    def job(self, group: Group, temperature: float) -> Job:
        params = [
            SamplingParams(
                temperature=temperature,
                seed=prompt_seed(self.seed, p.id),
                max_tokens=self.max_new_tokens,
                stop=p.stop,
            )
            for p in group.prompts
        ]
        return Job([p.ids for p in group.prompts], params)


def run(bench: Bench, store: Store, on_result: Callable[[Result], None]) -> None:
    """Decode what ``store`` does not hold yet. ``on_result`` hears of every result, first of those it holds."""
    for result in store.results.values():
        on_result(result)
    todo = [turn for turn in turns(bench) if not all(key in store.results for key in keys(*turn))]
    for method, temperature in dict.fromkeys((method, t) for _, method, t, _ in todo):
        with suppress(RuntimeError):  # a peer that cannot start says so in its results
            warm_up(bench, method, temperature)
    for turn in todo:
        results = take(bench, *turn)
        store.add(results)
        for result in results:
            on_result(result)


def take(bench: Bench, group: Group, method: Method, temperature: float, round_: int) -> list[Result]:
    """One turn. A failure is a result, too."""
    job, number = bench.job(group, temperature), round_ * len(bench.groups) + group.number
    where, started = keys(group, method, temperature, round_), perf_counter()
    try:
        outputs = bench.decoder(method).generate(job.prompts, job.params)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return [Result.failed(key, number, p.seed or 0, reason) for key, p in zip(where, job.params, strict=True)]
    wall_s, peak = perf_counter() - started, peak_memory(bench.decoder(method))
    versions = bench.peers[method].versions if method in bench.peers else None
    return [Result.of(key, number, output, peak, wall_s, versions) for key, output in zip(where, outputs, strict=True)]


def peak_memory(llm: LLM | Peer) -> int:
    """Bytes. Our own methods share a process, so each has what all needed so far."""
    if isinstance(llm, Peer):
        return llm.peak_memory_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def turns(bench: Bench) -> Iterator[tuple[Group, Method, float, int]]:
    """Every method has a group before anyone has the next, in an order that is shuffled for each, always the same way:
    nobody always follows the same other one. Every other round runs backwards."""
    for round_ in range(bench.num_rounds):
        for group in bench.groups:
            for temperature in bench.temperatures:
                order = bench.methods(temperature)
                Random(f"{group.number}/{temperature}").shuffle(order)
                for method in reversed(order) if round_ % 2 else order:
                    yield group, method, temperature, round_


def keys(group: Group, method: Method, temperature: float, round_: int = 0) -> list[Key]:
    """Of the results of one turn."""
    return [Key(p.task, p.id, method.typed, shape(method)["budget"], temperature, round_) for p in group.prompts]


def warm_up(bench: Bench, method: Method, temperature: float) -> None:
    """Let lazily made things be made before anything is timed."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    prompts = [p.ids for p in bench.groups[0].prompts]
    bench.decoder(method).generate(prompts, [params] * len(prompts))


def audit_all(bench: Bench, results: Mapping[Key, Result]) -> dict[Key, Audit]:
    """Judge every result whose tokens differ from plain decoding's. Other engines need not give the same text."""
    plain = next(iter(bench.llms))
    found = {}
    for group, method, temperature, round_ in turns(bench):
        if method in bench.peers:
            continue
        llms = bench.llms[plain], bench.llms[method]
        pairs = zip(keys(group, plain, temperature, round_), keys(group, method, temperature, round_), strict=True)
        for index, pair in enumerate(pairs):
            ours, theirs = (results[key] for key in pair)
            if ours.token_ids != theirs.token_ids and not (ours.error or theirs.error):
                found[pair[1]] = audit(llms, bench.job(group, temperature), index, (ours.token_ids, theirs.token_ids))
    return found
