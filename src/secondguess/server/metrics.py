"""Prometheus metrics. Names and meanings are vLLM's, under ``secondguess:``; draft tokens have a ``level`` besides.

Counters of tokens are read from the engine when they are asked for; latencies are measured where a client would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from secondguess.llm import LLM
from secondguess.types import Delta, Drafting, Output, Totals

PREFIX = "secondguess:"
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
LATENCIES = {
    "time_to_first_token_seconds": ("from a request to its first token", SLOW),
    "inter_token_latency_seconds": ("between tokens; tokens that came together share the time", FAST),
    "e2e_request_latency_seconds": ("from a request to its last token", SLOW),
    "request_queue_time_seconds": ("before prefill", SLOW),
    "request_prefill_time_seconds": ("in prefill", SLOW),
    "request_decode_time_seconds": ("in the cycles of a request", SLOW),
}


class Metrics:
    """All metrics of a server, in a registry of their own."""

    def __init__(self, llm: LLM, model: str) -> None:
        self.registry, self._llm, self._before = CollectorRegistry(), llm, Totals()
        self.registry.register(EngineCollector(llm, model, lambda: self.totals))
        self._latencies = {
            name: Histogram(PREFIX + name, help, ["model_name"], buckets=buckets, registry=self.registry).labels(model)
            for name, (help, buckets) in LATENCIES.items()
        }
        self._finished = self._counter("request_success", "requests that ended", "finished_reason")
        self._rejected = self._counter("request_rejected", "requests that found the queue full")
        self._model = model

    @property
    def totals(self) -> Totals:
        """Of the engine, since ``begin``."""
        return self._llm.totals - self._before

    def begin(self) -> None:
        """What the engine has done so far was for no client, and does not count."""
        self._before = self._llm.totals

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def observe(self, name: str, seconds: float) -> None:
        self._latencies[name].observe(seconds)

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def count_rejected(self, count: int) -> None:
        self._rejected.labels(self._model).inc(count)

    def clock(self, start: float) -> Clock:
        """For an answer to a request that came in at ``start``."""
        return Clock(self, start)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name", *labels], registry=self.registry)


class Clock:
    """Times one answer, from the arrival of its request."""

    def __init__(self, metrics: Metrics, start: float) -> None:
        self.metrics, self.start = metrics, start
        self.last: float | None = None  # when its newest token came
        self.ended = False

    def hear(self, delta: Delta) -> None:
        now, observe = perf_counter(), self.metrics.observe
        if self.last is None:
            observe("time_to_first_token_seconds", now - self.start)
        else:
            for _ in delta.token_ids:
                observe("inter_token_latency_seconds", (now - self.last) / len(delta.token_ids))
        self.last = now
        if delta.output:
            self.ended = True
            self._hear_end(delta.output, now)

    def give_up(self, reason: str) -> None:
        """No more will be heard, because of an "error" or, the client's wish, "abort"."""
        if not self.ended:
            self.ended = True
            self.metrics.count_finished(reason)

    def _hear_end(self, output: Output, now: float) -> None:
        observe, stats = self.metrics.observe, output.stats
        observe("e2e_request_latency_seconds", now - self.start)
        observe("request_queue_time_seconds", stats.queue_s)
        observe("request_prefill_time_seconds", stats.prefill_s)
        observe("request_decode_time_seconds", stats.decode_s)
        self.metrics.count_finished(output.finish_reason)


class EngineCollector(Collector):
    """Reads the engine's own counts, so that they can neither be missed nor be counted twice."""

    def __init__(self, llm: LLM, model: str, totals: Callable[[], Totals]) -> None:
        self.llm, self.model, self.totals = llm, model, totals

    def collect(self) -> Iterator[Metric]:
        totals, load = self.totals(), self.llm.load
        yield self._gauge("num_requests_running", "requests in the batch", load.num_running)
        yield self._gauge("num_requests_waiting", "requests in the queue", load.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "share of the K/V cache in use (1 is all)", load.cache_used)
        yield self._gauge("spec_accept_length", "tau since the start", totals.drafting.acceptance_length)
        yield self._gauge("spec_decode_paused", "1: drafting is slower than plain decoding", self.llm.paused)
        yield from self._tokens(totals)
        yield from self._drafting(totals.drafting)
        off = GaugeMetricFamily(PREFIX + "spec_decode_switched_off", "1: failed", labels=["model_name", "method"])
        for method in self.llm.methods:
            off.add_metric([self.model, method], method in self.llm.switched_off)
        yield off

    def _tokens(self, totals: Totals) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "tokens of prompts", [((), totals.num_prompt_tokens)])
        yield self._counter("prefix_cache_queries", "the same: all are looked up", [((), totals.num_prompt_tokens)])
        reused = "of these, tokens whose K/V were there already"
        yield self._counter("prefix_cache_hits", reused, [((), totals.num_reused_tokens)])
        yield self._counter("generation_tokens", "tokens of answers", [((), totals.num_tokens)])
        sent_back = "requests sent back to the queue for want of K/V room"
        yield self._counter("num_preemptions", sent_back, [((), totals.num_preemptions)])

    def _drafting(self, d: Drafting) -> Iterator[Metric]:
        def by_level(total: int, refined: int) -> list[tuple[tuple[str, ...], int]]:
            return [(("0",), total - refined), (("1",), refined)]

        drafted, accepted = (
            by_level(d.num_drafted, d.num_drafted_refined),
            by_level(d.num_accepted, d.num_accepted_refined),
        )
        counts = accepted_at(d)
        counts += [0] * (max(method.max_depth for method in self.llm.methods.values()) - len(counts))
        at = [((str(position),), count) for position, count in enumerate(counts)]
        yield self._counter("spec_decode_num_drafts", "cycles of requests with a draft", [((), d.num_drafts)])
        yield self._counter("spec_decode_num_draft_tokens", "tokens drafted", drafted, "level")
        yield self._counter("spec_decode_num_accepted_tokens", "of these, accepted", accepted, "level")
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", "by position in the path", at, "position")

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
        gauge.add_metric([self.model], value)
        return gauge

    def _counter(self, name: str, help: str, rows: Iterable[tuple[tuple[str, ...], int]], *labels: str) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, help, labels=["model_name", *labels])
        for values, count in rows:
            counter.add_metric([self.model, *values], count)
        return counter


def accepted_at(drafting: Drafting) -> list[int]:
    """Entry i: in how many cycles the draft token at position i of the path (from 0) was accepted."""
    deepest = max((accepted for _, accepted in drafting.cycles), default=0)
    return [sum(n for (_, a), n in drafting.cycles.items() if a > position) for position in range(deepest)]
