"""Runs every method over every prompt, in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from secondguess.bench.audit import Audit, Job, audit
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

    @property
    def num_results(self) -> int:
        return sum(len(g.prompts) for g in self.groups) * len(self.llms) * len(self.temperatures)

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
    for method, temperature in dict.fromkeys((method, t) for _, method, t in todo):
        warm_up(bench, method, temperature)
    for group, method, temperature in todo:
        job = bench.job(group, temperature)
        outputs = bench.llms[method].generate(job.prompts, job.params)
        made = zip(keys(group, method, temperature), outputs, strict=True)
        results = [Result.of(key, group.number, output) for key, output in made]
        store.add(results)
        for result in results:
            on_result(result)


def turns(bench: Bench) -> Iterator[tuple[Group, Method, float]]:
    """Every method has a group before anyone has the next; who begins rotates."""
    methods = list(bench.llms)
    for group in bench.groups:
        start = group.number % len(methods)
        for temperature in bench.temperatures:
            for method in methods[start:] + methods[:start]:
                yield group, method, temperature


def keys(group: Group, method: Method, temperature: float) -> list[Key]:
    """Of the results of one turn."""
    return [Key(p.task, p.id, method.typed, shape(method)["budget"], temperature) for p in group.prompts]


def warm_up(bench: Bench, method: Method, temperature: float) -> None:
    """Let lazily made things be made before anything is timed."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    bench.llms[method].generate([p.ids for p in bench.groups[0].prompts], params)


def audit_all(bench: Bench, results: Mapping[Key, Result]) -> dict[Key, Audit]:
    """Judge every result whose tokens differ from plain decoding's."""
    plain = next(iter(bench.llms))
    found = {}
    for group, method, temperature in turns(bench):
        pairs = zip(keys(group, plain, temperature), keys(group, method, temperature), strict=True)
        for index, pair in enumerate(pairs):
            ours, theirs = (results[key].token_ids for key in pair)
            if ours != theirs:
                llms = bench.llms[plain], bench.llms[method]
                found[pair[1]] = audit(llms, bench.job(group, temperature), index, (ours, theirs))
    return found
