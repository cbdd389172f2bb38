"""A worker's `/metrics`: vLLM's names and labels where vLLM has the figure, else names that begin with `coterie:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from coterie.engines.embedded.stats import Stats

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)

_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm:num_requests_running": ("Requests that are computed.", lambda stats: stats.running),
    "vllm:num_requests_waiting": ("Requests that wait.", lambda stats: stats.waiting + stats.loading),
    "vllm:kv_cache_usage_perc": ("KV blocks in use; 1 is all.", lambda stats: stats.kv_usage),
    "coterie:kv_leases": ("Finished prompts that wait for a decode worker.", lambda stats: stats.kept),
}
_COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm:prompt_tokens": ("Prompt tokens processed.", lambda stats: stats.prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated.", lambda stats: stats.output_tokens),
    "vllm:num_preemptions": ("Requests that lost their blocks.", lambda stats: stats.preemptions),
    "vllm:prefix_cache_queries": ("Tokens looked up in the cache.", lambda stats: stats.prefix_queries),
    "vllm:prefix_cache_hits": ("Tokens of these that were found.", lambda stats: stats.prefix_hits),
    "vllm:external_prefix_cache_hits": ("Tokens fetched from another engine.", lambda stats: stats.fetched),
    "coterie:engine_steps": ("Steps computed.", lambda stats: stats.steps),
    "coterie:step_tokens": ("Tokens forwarded in all steps.", lambda stats: stats.step_tokens),
    "coterie:step_cpu_seconds": ("CPU time of the engine's thread in steps.", lambda stats: stats.step_cpu_s),
    "coterie:active_experts": (
        "Different experts that a step used, the mean over MoE layers, summed over steps.",
        lambda stats: sum(stats.active_experts) / max(len(stats.active_experts), 1),
    ),
}


class _EngineCollector(Collector):
    """Reads the engine when scraped."""

    def __init__(self, stats: Callable[[], Stats], labels: tuple[str, ...], kernel: str) -> None:
        self._stats = stats
        self._labels = labels
        self._kernel = kernel

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, read(stats))
            yield counter
        yield self._waiting(stats)
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in stats.finished.items():
            ended.add_metric((*self._labels, reason), count)
        yield ended
        kernel = InfoMetricFamily("coterie:kernel", "What computes the model.", labels=_LABELS)
        kernel.add_metric(self._labels, {"kernel": self._kernel})
        yield kernel

    def _waiting(self, stats: Stats) -> Metric:
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for room (capacity), or for their KV (deferred).",
            labels=(*_LABELS, "reason"),
        )
        waiting.add_metric((*self._labels, "capacity"), stats.waiting)
        waiting.add_metric((*self._labels, "deferred"), stats.loading)
        return waiting


class Metrics:
    """All metrics of one worker.

    Attributes:
        first_token_s: seconds from a request's arrival to its first output token.
        between_tokens_s: seconds between two output tokens.
        whole_s: seconds from a request's arrival to its end.

    Args:
        stats: reads the engine.
        model: name of the model.
        kernel: name of what computes it.
    """

    def __init__(self, stats: Callable[[], Stats], model: str, kernel: str) -> None:
        self._registry = CollectorRegistry()
        labels = (model, "0")
        self._registry.register(_EngineCollector(stats, labels, kernel))
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Seconds to the first token.", labels)
        self.between_tokens_s = self._histogram("inter_token_latency_seconds", "Seconds between tokens.", labels)
        self.whole_s = self._histogram("e2e_request_latency_seconds", "Seconds of whole requests.", labels)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, _LABELS, buckets=_SECONDS, registry=self._registry)
        return histogram.labels(*labels)
