"""What the server counts, as Prometheus reads it: https://prometheus.io/docs/instrumenting/exposition_formats."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmc.runtime.engine.results import Stats
from llmc.runtime.model import Model

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_GROWING = {"steps", "rows", "hit_tokens", "preempted", "tokens", "drafted", "accepted"}
_TOLD = {
    "running": "queries that hold pages of the cache", "waiting": "queries that wait for room",
    "pages": "pages of the cache", "pages_free": "pages of the cache that are free",
    "pages_kept": "pages that only kept prefixes hold", "steps": "calls of the compiled step",
    "rows": "tokens that passed through it", "hit_tokens": "tokens of prompts that the cache had",
    "preempted": "times that a query gave its pages up", "tokens": "tokens made",
    "drafted": "tokens guessed ahead", "accepted": "tokens guessed ahead and right",
}  # fmt: skip


class Metrics:
    """Counters of requests and tokens, and the engine's figures at the moment somebody asks."""

    def __init__(self, model: Model) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(model))
        self.requests = Counter(
            "llmc_requests", "Requests, by route and status.", ["route", "status"], registry=self._registry
        )
        self._prompt = Counter("llmc_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._made = Counter("llmc_completion_tokens", "Tokens of answers.", registry=self._registry)
        self._first = Histogram(
            "llmc_first_token_seconds", "Until a request's first token.", buckets=_SECONDS, registry=self._registry
        )
        self._between = Histogram(
            "llmc_between_tokens_seconds", "Between tokens of a request.", buckets=_SECONDS, registry=self._registry
        )

    def count(self, usage: dict[str, Any]) -> None:
        """Add a request's tokens."""
        self._prompt.inc(usage["prompt_tokens"])
        self._made.inc(usage["completion_tokens"])

    def clock(self) -> Clock:
        """What takes the time of a request that begins now."""
        return Clock(self._first, self._between)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self._registry)


class Clock:
    """Takes the time of a request's tokens."""

    def __init__(self, first: Histogram, between: Histogram) -> None:
        self._histogram, self._between = first, between
        self._last = time.perf_counter()

    def token(self) -> None:
        """A token has come."""
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._histogram, self._last = self._between, now


class _Figures(Collector):
    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterable[Metric]:
        stats: Stats = self._model.engine.stats
        for name, value in stats._asdict().items():
            family = CounterMetricFamily if name in _GROWING else GaugeMetricFamily
            yield family(f"llmc_engine_{name}", f"{_TOLD[name].capitalize()}.", value=value)
