"""Routing by domain labels: what locality would be if each request told its topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from coterie.activations import ActivationTrace
from coterie.core import Decision, RouteRequest, WorkerState
from coterie.errors import ConfigError
from coterie.routing.load import load_only
from coterie.routing.locality import groups_of
from coterie.routing.policy import Reads, least_loaded

MISC = "misc"
"""Name of the pool that the small domains share."""


class Domain:
    """Pools of decode groups, one for each large domain.

        pool   = pool of the request's label
        worker = argmin requests over the pool's workers

    A domain's pool is its share of the trace, in groups (`quotas`); the domains too small for one share the pool
    `misc`.  Inside a pool the least loaded worker is taken, ties to the least recently assigned.

    The label is the one the client gave (`x-coterie-domain`); otherwise that of the same prompt in the trace.  A
    request without a label, with one that the trace does not know, or whose pool has no available worker, goes
    to the least loaded of all, and the decision says why.

    Source: the domain oracle that ELDR section 1.3 compares with.

    Args:
        trace: labelled requests; those without a label are left out of the shares.
        targets: all workers that may ever be chosen from, in the gateway's order.

    Raises:
        ConfigError: no request of the trace has a label, or one prompt has two.
    """

    name = "domain"
    reads = frozenset({Reads.PROMPT_HASH})

    def __init__(self, trace: ActivationTrace, targets: Sequence[WorkerState]) -> None:
        self._label_of = _labels_by_prompt(trace)
        groups = groups_of(targets)
        requests = Counter(label for label in trace.labels if label)
        self._pool_of = pools_of(requests, len(groups))
        self._groups = _deal(quotas(requests, len(groups)), groups)

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the least loaded worker of the label's pool."""
        label = request.domain or self._label_of.get(request.prompt_hash or "")
        if label is None:
            return load_only(workers, "no label")
        pool = self._pool_of.get(label)
        if pool is None:
            return load_only(workers, "unknown label", label[:60])
        groups = self._groups.get(pool, frozenset())
        candidates = [worker for worker in workers if worker.group in groups]
        if not candidates:
            return load_only(workers, "no worker in the pool", pool)
        names = tuple(worker.name for worker in candidates)
        return Decision(least_loaded(candidates).name, "domain pool", candidates=names, detail=pool)


def pools_of(requests: Mapping[str, int], groups: int) -> dict[str, str]:
    """The pool of each label: its own if it has at least `1 / groups` of the requests, else `misc`."""
    total = sum(requests.values())
    return {label: label if count * groups >= total else MISC for label, count in requests.items()}


def quotas(requests: Mapping[str, int], groups: int) -> dict[str, int]:
    """Divide the groups among the pools by largest remainder.

        exact = groups * requests of the pool / requests of all

    Each pool gets the whole part, and those with the largest remainders one more until none is left; equal
    remainders by name.  A domain with a pool of its own gets at least one group, `misc` may get none.

    Args:
        requests: requests of each label, at least one.
        groups: number of decode groups.

    Returns:
        groups of each pool, the largest pool first; their sum is `groups`.
    """
    sizes: Counter[str] = Counter()
    for label, pool in pools_of(requests, groups).items():
        sizes[pool] += requests[label]
    total = sum(sizes.values())
    shares = {pool: groups * size // total for pool, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda pool: (-(groups * sizes[pool] % total), pool))
    for pool in by_remainder[: groups - sum(shares.values())]:
        shares[pool] += 1
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _deal(shares: Mapping[str, int], groups: Sequence[str]) -> dict[str, frozenset[str]]:
    """Give each pool the next groups in order."""
    dealt, start = {}, 0
    for pool, share in shares.items():
        dealt[pool] = frozenset(groups[start : start + share])
        start += share
    return dealt


def _labels_by_prompt(trace: ActivationTrace) -> dict[str, str]:
    labels: dict[str, str] = {}
    for prompt, label in zip(trace.prompt_hashes, trace.labels, strict=True):
        if label and labels.setdefault(prompt, label) != label:
            raise ConfigError(
                f"domain: the trace labels the prompt {prompt} both {labels[prompt]} and {label}; "
                "record it with one label for each prompt"
            )
    if not labels:
        raise ConfigError('domain: no request of the trace has a label; collect prompts that have a "label"')
    return labels
