"""The gateway's metrics: a registry of their own, every name begins with `coterie_`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coterie.core import Decision, Role
from coterie.gateway.fleet.workers import Fleet
from coterie.routing import Shown

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_MOST_LABELS = 10_000


class Labelled(Collector):
    """A counter with labels: numbers in a dictionary, made a metric when scraped.

    Requests pay a tenth of what the client library's own counter costs, which is locked for other threads.

    Label values beyond the first ten thousand combinations, those of hundreds of workers, are counted as "other", so
    that no worker or client can make the registry grow without bound.
    """

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def inc(self, *values: str) -> None:
        """Count one for these label values."""
        counts = self._counts
        if values not in counts and len(counts) >= _MOST_LABELS:
            values = ("other",) * len(self._labels)
        counts[values] = counts.get(values, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Seconds(Collector):
    """A histogram of times: numbers in a list, made a metric when scraped."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one that took so long."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        bounds = (*map(str, _SECONDS), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum_s)


class _FleetCollector(Collector):
    """Reads ledgers and policies when scraped, so that requests pay nothing for these figures."""

    def __init__(self, fleets: Iterable[Fleet]) -> None:
        self._fleets = tuple(fleets)

    def collect(self) -> Iterator[Metric]:
        labels = ("role", "worker")
        available = GaugeMetricFamily("coterie_worker_available", "1 if the worker can be used.", labels=labels)
        breakers = GaugeMetricFamily("coterie_breaker_open", "1 unless the worker's breaker is closed.", labels=labels)
        requests = GaugeMetricFamily("coterie_in_flight_requests", "Requests the worker holds.", labels=labels)
        tokens = GaugeMetricFamily(
            "coterie_in_flight_tokens", "Prompt and expected output tokens the worker holds.", labels=labels
        )
        kv_usage = GaugeMetricFamily("coterie_worker_kv_usage", "KV cache that is held; 1 is all.", labels=labels)
        waiting = GaugeMetricFamily("coterie_worker_waiting", "Requests that wait for room there.", labels=labels)
        for fleet in self._fleets:
            own = fleet.ledger.own()  # of several processes each tells its own, so that sums are right
            for state in fleet.ledger.states():
                where = (fleet.role, state.name)
                available.add_metric(where, float(state.available))
                breakers.add_metric(where, float(fleet.workers[state.name].breaker.state != "closed"))
                requests.add_metric(where, own[state.name].requests)
                tokens.add_metric(where, own[state.name].tokens)
                if state.reading is not None:
                    kv_usage.add_metric(where, state.reading.kv_usage)
                    waiting.add_metric(where, state.reading.waiting)
        yield from (available, breakers, requests, tokens, kv_usage, waiting)
        for fleet in self._fleets:
            yield from _of_policy(fleet)


def _of_policy(fleet: Fleet) -> Iterator[Metric]:
    if not isinstance(fleet.policy, Shown):
        return
    for name, value in fleet.policy.figures(fleet.clock.now()).items():
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield family(f"coterie_{name}", f"Of the {fleet.role} policy {fleet.policy.name}.", value=value)


class Metrics:
    """All metrics of one gateway.

    Attributes:
        registry: what `/metrics` renders.
        requests: requests by path and status.
        decisions: choices by role, worker and reason.
        passed_over: times a filter kept a decode worker from the policy, by worker and reason.
        reading_failures: readings of decode workers' metrics that failed, by worker.
        errors: transport errors by worker and kind.
        retries: requests that were sent to another worker, by the leg that failed and why.
        retries_refused: requests that were not, since too many were, by the leg that failed.
        continuations: streams that a worker failed after the client had a part of them, by outcome.
        breakers: openings of breakers, by worker.
        released: handoffs released without decoding, by outcome.
        refusals: requests that were not taken, by reason.
        disconnects: clients that left, by what was going on.
        counts_problems: requests routed without counts, by kind.
        not_split: requests whose prompt a decode worker computed, by the reason.
        answered_by_prefill: requests that needed no decode worker, by the reason.
        reloads: reloads of the configuration, by outcome.
        total_s: seconds from a complete request to the end of its reply.
        first_byte_s: seconds to the first byte of its reply's body (time to first token, where streamed).
        queue_s: seconds that requests which were let in had waited, where there is a bound on those in flight.
        handoff_s: seconds from the prefill reply to the first byte of a streamed reply.
        prefill_s: seconds of the prefill leg.
        decode_s: seconds of the decode leg.
    """

    def __init__(self, fleets: Iterable[Fleet]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(fleets))
        self.requests = self._counter("requests", "Requests by path and status.", "path", "status")
        self.decisions = self._counter("decisions", "Choices of a worker.", "role", "worker", "reason")
        self.passed_over = self._counter("passed_over", "Times a filter passed a worker over.", "worker", "reason")
        self.reading_failures = self._counter("reading_failures", "Readings of metrics that failed.", "worker")
        self.errors = self._counter("transport_errors", "Workers that could not be talked to.", "worker", "kind")
        self.retries = self._counter("retries", "Requests sent to another worker.", "role", "reason")
        self.continuations = self._counter("continuations", "Streams that a worker failed midway.", "outcome")
        self.retries_refused = self._counter("retries_refused", "Retries that the budget did not allow.", "role")
        self.breakers = self._counter("breaker_openings", "Times a worker's breaker opened.", "worker")
        self.released = self._counter("handoffs_released", "Handoffs released without decoding.", "outcome")
        self.refusals = self._counter("refusals", "Requests that were not taken.", "reason")
        self.disconnects = self._counter("client_disconnects", "Clients that left early.", "window")
        self.counts_problems = self._counter("counts_problems", "Requests routed without counts.", "kind")
        self.not_split = self._counter("not_split", "Requests that a decode worker computed alone.", "reason")
        self.answered_by_prefill = self._counter(
            "answered_by_prefill", "Requests that a prefill worker answered.", "reason"
        )
        self.reloads = self._counter("reloads", "Reloads of the configuration.", "outcome")
        self.total_s = self._histogram("request_seconds", "Seconds from a complete request to the reply's end.")
        self.first_byte_s = self._histogram("ttft_seconds", "Seconds to the first byte of the reply's body.")
        self.queue_s = self._histogram("queue_seconds", "Seconds that requests waited for their turn.")
        self.handoff_s = self._histogram("handoff_seconds", "Seconds from the prefill reply to a stream's first byte.")
        self.prefill_s = self._histogram("prefill_seconds", "Seconds of the prefill leg.")
        self.decode_s = self._histogram("decode_seconds", "Seconds of the decode leg.")

    def decided(self, role: Role, decision: Decision) -> None:
        """Count a decision under its rule; its particulars are left to the admin side and the log."""
        self.decisions.inc(role, decision.worker, decision.reason)
        for worker, reason in decision.passed_over:
            self.passed_over.inc(worker, reason)

    def show(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Have a gauge that is read when scraped."""
        Gauge(f"coterie_{name}", text, registry=self.registry).set_function(read)

    def _counter(self, name: str, text: str, *labels: str) -> Labelled:
        counter = Labelled(f"coterie_{name}", text, labels)
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str, text: str) -> Seconds:
        histogram = Seconds(f"coterie_{name}", text)
        self.registry.register(histogram)
        return histogram
