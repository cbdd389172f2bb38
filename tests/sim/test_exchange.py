"""Several gateways of one simulated cluster, and what they know of each other."""

from dataclasses import replace

import numpy as np
import pytest
from test_sim_cluster import POPULATION, SPEC, policies

from coterie.core import ModelGeometry
from coterie.errors import ConfigError
from coterie.routing import Load
from coterie.sim import Stream, simulate
from coterie.sim.cluster import Cluster
from coterie.sim.exchange import Exchange
from coterie.sim.kernel import Kernel, Priority
from coterie.sim.workload import arrivals

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=1)


def decisions(decode, **spec):
    log = []
    several = replace(SPEC, **spec)
    simulate(POPULATION, Stream(60, 1.5), several, **policies(several, decode), on_decision=log.append)
    return [(one.time_s, one.role, one.decision) for one in log]


@pytest.mark.parametrize("decode", ["round_robin", "least_load", "locality"])
def test_gateways_that_know_of_each_other_at_once_decide_as_one(decode):
    assert decisions(decode, gateways=3) == decisions(decode)
    assert decisions(decode, gateways=3, exchange_s=None) != decisions(decode)


def run(**spec):
    """Mean view error of a cluster over all events of a run, and that at the end."""
    kernel, several = Kernel(), replace(SPEC, **spec)
    cluster = Cluster(kernel, several, POPULATION.experts, **policies(several, "marginal"))
    cluster.feed(arrivals(POPULATION, Stream(60, 1.5), 0))
    errors = [cluster.view_error("decode") for _ in iter(kernel.step, False)]
    census = cluster.census()
    assert census.arrived == census.finished
    assert sum(one.given - one.released for one in cluster.leases().values()) == 0
    assert sum(one.given for one in cluster.leases().values()) == census.finished
    return sum(errors) / len(errors), cluster.view_error("decode")


@pytest.mark.parametrize("batches", [True, False])
def test_views_are_right_at_once_late_or_never_and_right_when_all_is_over(batches):
    assert run(gateways=3, exchange_batches=batches) == (0, 0)
    late, at_the_end = run(gateways=3, exchange_s=0.01, exchange_batches=batches)
    never, never_at_the_end = run(gateways=3, exchange_s=None)
    assert 0 < late < never
    assert at_the_end == never_at_the_end == 0


def test_a_view_hears_of_load_after_the_delay_and_adds_up_the_others():
    kernel = Kernel()
    exchange = Exchange(kernel, 3, delay_s=2.0)
    exchange.loads[0].show(1, Load(1, 10, 4))
    exchange.loads[1].show(1, Load(2, 30, 3))
    assert list(exchange.loads[2].changed()) == []
    kernel.at(1.0, Priority.START, exchange.loads[0].show, 1, Load(0, 0, 4))
    heard = []
    kernel.at(2.5, Priority.START, lambda: heard.extend(exchange.loads[2].changed()))
    kernel.run()
    assert heard == [(1, Load(3, 40, 4))]
    assert list(exchange.loads[2].changed()) == [(1, Load(2, 30, 4))]
    assert list(exchange.loads[0].changed()) == [(1, Load(2, 30, 3))]


def test_a_view_of_batches_gives_what_the_others_requests_grew_by_also_of_those_before_it():
    exchange = Exchange(Kernel(), 3, delay_s=0.0)
    row = np.array([-1, -2, 0, -3], dtype=np.int32)
    one = exchange.batches(["a", "b"], GEOMETRY)
    one.show(1, row, +1)
    other = exchange.batches(["a", "b"], GEOMETRY)
    one.show(1, 2 * row, +1)
    assert grown(other) == [(1, 2, [-3, -6, 0, -9])]
    assert grown(other) == grown(one) == []
    one.show(1, row, -1)
    assert grown(other) == [(1, -1, [1, 2, 0, 3])]


def grown(view):
    return [(group, requests, sums.tolist()) for group, requests, sums in view.changed()]


def test_a_cluster_without_a_gateway_or_with_news_of_the_future_is_refused():
    with pytest.raises(ConfigError, match="gateways must be at least 1, got 0"):
        replace(SPEC, gateways=0)
    with pytest.raises(ConfigError, match="exchange_s must not be negative, got -1"):
        replace(SPEC, exchange_s=-1)
