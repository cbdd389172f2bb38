"""The monitor's metrics for Prometheus; every name begins with `coterie_expert_monitor_`."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coterie.experts.members import State
from coterie.experts.monitor.messages import Status
from coterie.experts.monitor.monitor import Monitor
from coterie.experts.monitor.status import status

_PREFIX = "coterie_expert_monitor_"


class MonitorMetrics(Collector):
    """Reads what the monitor knows when it is asked."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        now = status(self._monitor)
        coverage = now.coverage
        gauges = {
            "epoch": ("Number of the last change of membership.", now.epoch),
            "settled": ("Whether every server that lives has registered with this monitor.", now.settled),
            "followers": ("Clients that are told of changes.", now.followers),
            "missing_experts": ("Experts, over all layers, that no server has which could be asked.", coverage.missing),
            "single_experts": ("Experts, over all layers, that one server alone serves.", coverage.replicas.get(1, 0)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        if coverage.imbalance is not None:
            text = "Load of the busiest server over that of the mean server."
            yield GaugeMetricFamily(_PREFIX + "imbalance", text, value=coverage.imbalance)
        yield _states(now)
        yield from _servers(now)


def _states(now: Status) -> Metric:
    counts = Counter(row.state for row in now.servers)
    family = GaugeMetricFamily(_PREFIX + "servers", "Servers, by what is thought of them.", labels=("state",))
    for state in typing.get_args(State):
        family.add_metric([state], counts[state])
    return family


def _servers(now: Status) -> Iterator[Metric]:
    """A figure for each server that is not dead; those of one name, which is a server started again, together."""
    pairs: dict[str, float] = {}
    silent: dict[str, float] = {}
    for row in now.servers:
        if row.state != "dead":
            pairs[row.name] = row.pairs_per_s + pairs.get(row.name, 0.0)
            silent[row.name] = max(row.silent_s, silent.get(row.name, 0.0))
    families = {
        "pairs_per_second": ("Pairs of token and expert that a server computes, of late.", pairs),
        "silent_seconds": ("How long nothing was heard of a server.", silent),
    }
    for name, (text, values) in families.items():
        family = GaugeMetricFamily(_PREFIX + name, text, labels=("server",))
        for server, value in values.items():
            family.add_metric([server], value)
        yield family
