"""Expert servers without processes, whose faults are a script, on a clock that only they move.

All values are small whole numbers, so that sums are exact in whatever order they are added: a sum that is right holds
each pair of token and expert once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coterie.clock import ManualClock
from coterie.core import ModelGeometry
from coterie.errors import EngineError, GoneError, InputError, WireError
from coterie.experts.client import RoutingTable, Server
from coterie.experts.protocol import Reply, Status
from coterie.experts.transport.pending import FullError

LAYERS, EXPERTS, HIDDEN, TOP_K = 2, 6, 3, 2
GEOMETRY = ModelGeometry(LAYERS, EXPERTS, TOP_K)
NEVER_S = float("inf")


def output(layer, expert, rows):
    """What an expert makes of `rows [n, H]`; no two make the same."""
    return rows * (expert + 1) + 10 * layer + expert


def expected(layer, rows, ids, weights):
    """Pair by pair."""
    result = np.zeros_like(rows)
    for token, experts in enumerate(ids):
        for place, expert in enumerate(experts):
            if expert >= 0:
                result[token] += weights[token, place] * output(layer, expert, rows[token])
    return result


@dataclass
class FakeServer:
    """One server.

    Attributes:
        script: what becomes of its requests, one after the other: `reply`, `late` (after 1 s), `never`, `die`,
            `die_late` (after 1 s), `stale`, `absent`, `torn`, `short`, `malformed`; `reply` after the last.
        held: `[L]` experts that it has.
        epoch: since when.
        dead: whether it is.
        stopped: whether it is suspended, and so replies to nothing.
        slots: clients' connections that it takes.
        tokens: most that a request may have.
        asked: requests that it got.
    """

    script: list = field(default_factory=list)
    held: list = field(default_factory=lambda: [set(range(EXPERTS))] * LAYERS)
    epoch: int = 0
    dead: bool = False
    stopped: bool = False
    slots: int = 4
    tokens: int = 64
    asked: list = field(default_factory=list)

    def answer(self, request):
        if request.epoch < self.epoch:
            return self._refusal(Status.STALE)
        wanted = set(request.ids[request.ids >= 0].tolist())
        if not wanted <= self.held[request.layer]:
            return self._refusal(Status.ABSENT)
        return Reply(self.epoch, Status.COMPUTED, expected(request.layer, request.hidden, request.ids, request.weights))

    def _refusal(self, status):
        return Reply(self.epoch, status, np.empty((0, HIDDEN), np.float32))


class FakePending:
    def __init__(self, world, server, what, request, link):
        self.world, self.server, self.what, self.request, self.link = world, server, what, request, link
        delays = {"late": 1.0, "die_late": 1.0, "never": NEVER_S}
        self.ready_s = world.clock.now() + delays.get(what, 0.001)
        self.over = False

    def look(self, until_s):
        assert not self.over, "it was taken or withdrawn"
        ready_s = NEVER_S if self.server.stopped else self.ready_s
        if until_s > self.world.clock.now():
            self.world.advance_to(min(until_s, ready_s))
        if self.server.dead:
            self.withdraw()
            raise GoneError("it died")
        if ready_s > self.world.clock.now():
            return None
        if self.what.startswith("die"):
            self.server.dead = True
            return self.look(until_s)
        self.withdraw()
        if self.what == "torn":
            raise WireError("torn")
        return self._reply()

    def _reply(self):
        if self.what in ("stale", "absent"):
            self.server.epoch = self.world.announce()
        reply = self.server.answer(self.request)
        if self.what == "short":
            return Reply(0, Status.COMPUTED, reply.sums[:0])
        return Reply(0, Status.MALFORMED, reply.sums[:0]) if self.what == "malformed" else reply

    def withdraw(self):
        self.over, self.link.busy = True, False


class FakeLink:
    def __init__(self, world, server):
        self.world, self.server, self.busy, self.probes = world, server, False, False

    def post(self, request):
        assert not self.busy, "a connection has one request at a time"
        if len(request.hidden) > self.server.tokens:
            raise InputError(f"{len(request.hidden)} tokens; the slot holds {self.server.tokens}")
        self.busy = True
        self.probes = bool((request.ids < 0).all())
        if not self.probes:
            self.server.asked.append(request)
        what = self.server.script.pop(0) if self.server.script and not self.probes else "reply"
        return FakePending(self.world, self.server, what, request, self)

    def close(self):
        assert not self.busy
        self.world.open.remove(self)


class World:
    """Servers `a`, `b`, ..., their clock, and the directory that a client asks."""

    def __init__(self, *servers, tokens=64):
        self.clock = ManualClock()
        self.servers = dict(zip("abcdef", servers, strict=False))
        self.tokens, self.epoch = tokens, 0
        self.open = []
        self.later = []
        self.doubts = []
        self._table = self._known()

    def connect(self, server):
        found = self.servers[server.name]
        if found.dead:
            raise EngineError("it is gone")
        if sum(link.server is found for link in self.open) == found.slots:
            raise FullError("all slots are taken")
        self.open.append(FakeLink(self, found))
        return self.open[-1]

    def at(self, time_s, change):
        """Have something happen."""
        self.later.append((time_s, change))

    def advance_to(self, time_s):
        assert time_s < NEVER_S, "a wait without end"
        self.clock.advance(max(0.0, time_s - self.clock.now()))
        due = [change for at_s, change in self.later if at_s <= time_s]
        self.later = [item for item in self.later if item[0] > time_s]
        for change in due:
            change()

    def announce(self):
        """A new epoch, which clients get to know when they look for it."""
        self.epoch += 1
        return self.epoch

    def _known(self):
        held = {Server(name, name): server.held for name, server in self.servers.items()}
        return RoutingTable.of(GEOMETRY, held, epoch=self.epoch, tokens=self.tokens)

    def table(self):
        return self._table

    def doubt(self, server, *, gone):
        self.doubts.append((server.name, gone))

    def await_newer(self, table, until_s):
        if self.epoch > table.epoch:
            self._table = self._known()
        else:
            self.advance_to(until_s)
