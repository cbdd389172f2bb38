"""What the monitor knows, as `coterie experts status` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from coterie.experts.members import Member
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
    everything = [(layer, expert) for layer in range(len(first.held)) for expert in range(first.experts)]
    serving = _owners(member for member in living if member.state == "serving")
    usable = _owners(member for member in living if member.state != "joining")
    missing = [one for one in everything if not usable[one]]
    servers = [member.server for member in living if member.state == "serving"]
    return Coverage(
        model=first.model,
        fingerprint=first.fingerprint,
        layers=len(first.held),
        experts=first.experts,
        replicas=dict(sorted(Counter(serving[one] for one in everything).items())),
        missing=len(missing),
        first_missing=next(iter(missing), None),
        imbalance=imbalance(monitor.demand.rates(servers).sum(axis=2)) if servers else None,
    )


def _owners(members: Iterable[Member]) -> Counter[tuple[int, int]]:
    """How many of the members have each expert, by layer and expert."""
    return Counter(
        (layer, expert) for member in members for layer, experts in enumerate(member.server.held) for expert in experts
    )
