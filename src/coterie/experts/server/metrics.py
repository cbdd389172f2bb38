"""A server's metrics for Prometheus; every name begins with `coterie_expert_server_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from coterie.experts.server.process import Serving

_PREFIX = "coterie_expert_server_"


class ServerMetrics(Collector):
    """Reads a server's counts when it is asked."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        intake, server = self._serving.intake, self._serving.server
        usage = server.usage
        counters = {
            "batches": ("Batches computed.", usage.batches),
            "merged_requests": ("Requests in these batches.", usage.merged),
            "tokens": ("Tokens in these batches.", usage.tokens),
            "active_experts": ("Different experts that a batch had, summed over batches.", usage.active),
            "expert_tokens": ("Tokens computed, summed over experts.", int(usage.load.sum())),
            "busy_seconds": ("Time spent computing.", usage.busy_s),
        }
        gauges = {
            "clients": ("Slots in use.", intake.clients),
            "queue": ("Requests that wait or are computed.", intake.waiting),
            "since_epoch": ("Membership epoch since when it has its experts.", server.holding.since),
            "held_experts": ("Experts it has, over all layers.", sum(map(len, server.holding.held))),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        requests = CounterMetricFamily(_PREFIX + "requests", "Requests, by what became of them.", labels=("status",))
        for status, count in self._serving.requests.items():
            requests.add_metric([status], count)
        yield requests
