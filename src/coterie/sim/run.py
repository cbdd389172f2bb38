"""One run: a population, traffic, a cluster and two policies in; a row of figures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.errors import ConfigError
from coterie.routing import Policy
from coterie.sim.cluster import Cluster, OnDecision
from coterie.sim.kernel import Kernel
from coterie.sim.result import Row, sum_up
from coterie.sim.spec import Change, ClusterSpec
from coterie.sim.workload import Drift, Population, Traffic, arrivals


def simulate(
    population: Population,
    traffic: Traffic,
    spec: ClusterSpec,
    *,
    prefill: Policy,
    decode: Policy,
    seed: int = 0,
    drift: Drift | None = None,
    changes: Sequence[Change] = (),
    warm_up_s: float = 0.0,
    on_decision: OnDecision | None = None,
    on_end: Callable[[Cluster], object] | None = None,
) -> Row:
    """Simulate until every request has ended.

    The same arguments give the same row, to the last bit.  Arrivals, the order of requests and the chance of each
    role's policy are drawn from streams of their own, so that runs of one seed differ by their policies alone.

    Args:
        population: what the requests are drawn from.
        traffic: when they arrive.
        spec: the cluster.
        prefill: chooses prefill workers among `spec.targets("prefill")`.
        decode: chooses decode workers among `spec.targets("decode")`; a policy that keeps state must be new.
        seed: of all that is drawn.
        drift: from which domains requests come, and when; by default each request comes equally often.
        changes: workers that are lost or join.
        warm_up_s: requests that arrive before are served, and are in no figure of the row; nor are decode steps that
            begin before.
        on_decision: told of every decision.
        on_end: shown the cluster once all is over, for figures beyond the row.

    Raises:
        ConfigError: a change names no worker, a time cannot be, the drift names a domain without requests, or a
            decode worker's KV does not hold a whole request.
    """
    _check_room(population, spec)
    kernel = Kernel()
    cluster = Cluster(
        kernel,
        spec,
        population.experts,
        prefill=prefill,
        decode=decode,
        seed=seed,
        warm_up_s=warm_up_s,
        on_decision=on_decision,
    )
    cluster.plan(changes)
    cluster.feed(arrivals(population, traffic, seed, drift))
    kernel.run()
    if on_end is not None:
        on_end(cluster)
    layers = population.experts.geometry.layers
    return sum_up(cluster, layers, policy=decode.name, rate=traffic.rate_per_s, seed=seed)


def _check_room(population: Population, spec: ClusterSpec) -> None:
    longest = max(request.prompt_tokens + request.output_tokens for request in population.requests)
    if spec.kv_tokens is not None and longest > spec.kv_tokens // spec.block_tokens * spec.block_tokens:
        raise ConfigError(
            f"cluster: kv_tokens of {spec.kv_tokens} hold {spec.kv_tokens // spec.block_tokens} blocks of "
            f"{spec.block_tokens}; the longest request has {longest} tokens"
        )
