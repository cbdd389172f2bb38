"""What a simulation found."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

import numpy as np

from coterie.sim.cluster import Cluster
from coterie.sim.decode import StepTotals


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one rate.  Figures are None where there is nothing that they could be of.

    Attributes:
        policy: that chose decode workers.
        rate: requests each second.
        seed: of arrivals, order and policies.
        warm_up_s: seconds from the start whose arrivals and decode steps are in none of the figures below.
        requests: arrived.
        failed: of them, not served.
        tpot_p50_ms: median time per output token.
        tpot_p99_ms: its 99th percentile.
        ttft_p50_ms: median time to first token.
        ttft_p99_ms: its 99th percentile.
        active_experts_mean: different experts that a decode step activates in a layer, mean over steps and MoE layers.
        busiest_rank_experts_mean: those of them that the rank with most of them holds, mean likewise; without
            expert-parallel ranks the same.
        batch_mean: requests of a decode step, of all ranks of a group, mean over steps.
        decode_steps: of all decode groups.
        preemptions: requests taken out of a batch for want of KV blocks; one may be counted several times.
        busy_share: time in decode steps over the time of all decode groups, from the end of the warm-up until the last
            request ended.
    """

    policy: str
    rate: float
    seed: int
    warm_up_s: float
    requests: int
    failed: int
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    active_experts_mean: float | None
    busiest_rank_experts_mean: float | None
    batch_mean: float | None
    decode_steps: int
    preemptions: int
    busy_share: float | None


def sum_up(cluster: Cluster, layers: int, *, policy: str, rate: float, seed: int) -> Row:
    """Figures of a cluster that has served its requests.

    Args:
        cluster: with no request left in it.
        layers: MoE layers of the model.
        policy: name of its decode policy.
        rate: requests each second.
        seed: what was drawn with.
    """
    outcomes, totals = cluster.outcomes, cluster.totals()
    summed = {field.name: sum(getattr(one, field.name) for one in totals) for field in fields(StepTotals)}
    steps = summed["steps"]
    return Row(
        policy=policy,
        rate=rate,
        seed=seed,
        warm_up_s=outcomes.since_s,
        requests=outcomes.arrived,
        failed=outcomes.failed,
        tpot_p50_ms=_percentile_ms(outcomes.tpot_s, 50),
        tpot_p99_ms=_percentile_ms(outcomes.tpot_s, 99),
        ttft_p50_ms=_percentile_ms(outcomes.ttft_s, 50),
        ttft_p99_ms=_percentile_ms(outcomes.ttft_s, 99),
        active_experts_mean=summed["active"] / steps / layers if steps else None,
        busiest_rank_experts_mean=summed["busiest"] / steps / layers if steps else None,
        batch_mean=summed["requests"] / steps if steps else None,
        decode_steps=int(steps),
        preemptions=int(summed["preemptions"]),
        busy_share=summed["busy_s"] / ((cluster.end_s - outcomes.since_s) * len(totals)) if steps else None,
    )


def _percentile_ms(seconds: array[float], percent: int) -> float | None:
    """Of those that are not NaN; None where there are none."""
    values = np.asarray(seconds)
    values = values[~np.isnan(values)]
    return 1000 * float(np.percentile(values, percent)) if values.size else None
