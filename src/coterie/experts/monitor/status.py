"""What the monitor knows, as `coterie experts status` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from coterie.experts.members import Member, Server, best_owners, lacking
from coterie.experts.monitor.demand import imbalance
from coterie.experts.monitor.messages import Coverage, Load, ServerRow, Status
from coterie.experts.monitor.monitor import Monitor


def status(monitor: Monitor) -> Status:
    """All of it."""
    membership = monitor.membership
    return Status(
        run=monitor.run,
        epoch=membership.epoch,
        settled=membership.settled,
        up_s=monitor.up_s,
        followers=monitor.followers,
        servers=[_row(monitor, member) for member in membership.members],
        coverage=_coverage(monitor, membership.living),
    )


def _row(monitor: Monitor, member: Member) -> ServerRow:
    server = member.server
    load = monitor.demand.load(server.id) or Load(())
    return ServerRow(
        id=server.id,
        name=server.name,
        state=member.state,
        reason=member.reason,
        url=server.url,
        address=server.address,
        since=server.since,
        state_s=monitor.state_s(server.id),
        silent_s=monitor.silent_s(server.id),
        held=sum(map(len, server.held)),
        pairs_per_s=monitor.demand.rate(server.id),
        requests=load.requests,
        batches=load.batches,
        queue=load.queue,
        memory_bytes=load.memory_bytes,
    )


def _coverage(monitor: Monitor, living: Sequence[Member]) -> Coverage:
    if not living:
        return Coverage(
            model="", fingerprint="", layers=0, experts=0, replicas={}, missing=0, first_missing=None, imbalance=None
        )
    first = living[0].server
    servers = [member.server for member in living if member.state == "serving"]
    missing = lacking(best_owners(living))
    return Coverage(
        model=first.model,
        fingerprint=first.fingerprint,
        layers=len(first.held),
        experts=first.experts,
        replicas=dict(sorted(_replicas(first, servers).items())),
        missing=len(missing),
        first_missing=next(iter(missing), None),
        imbalance=imbalance(monitor.demand.rates(servers).sum(axis=2)) if servers else None,
    )


def _replicas(kind: Server, servers: Sequence[Server]) -> Counter[int]:
    """How many experts have how many owners among the servers; those of a model like one server's."""
    owners = Counter((layer, expert) for one in servers for layer, held in enumerate(one.held) for expert in held)
    return Counter(owners[layer, expert] for layer in range(len(kind.held)) for expert in range(kind.experts))
