"""The servers as one client meets them: sends the parts of calls, hears replies, turns to others where none come."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.clock import Clock
from coterie.errors import EngineError, GoneError, InputError, WireError
from coterie.experts.client.call import Call, Flight
from coterie.experts.client.links import Links
from coterie.experts.client.parts import Floats, Part, choose, cut, split
from coterie.experts.client.probes import Probes
from coterie.experts.client.standing import Servers, Standing
from coterie.experts.client.table import Directory, RoutingTable, Server
from coterie.experts.protocol import Reply, Status
from coterie.experts.transport.identity import own_identity
from coterie.experts.transport.pending import FullError

LOOK_S = 0.02
"""How often a client that waits looks whose patience is over, and for a newer table."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits before it turns to others.

    Attributes:
        reply_s: for a reply, before its server is suspect.  Only time in which the client waits counts, for whatever
            reply: it may do other work between.
        probe_s: between empty requests to a server that is not good.

    Raises:
        InputError: one is not positive.
    """

    reply_s: float = 1.0
    probe_s: float = 0.5

    def __post_init__(self) -> None:
        if not (self.reply_s > 0 and self.probe_s > 0):
            raise InputError(f"expert client: patience of {self.reply_s} s, {self.probe_s} s; both must be positive")


class Exchange:
    """Runs calls, one after the other or several at a time, in one thread."""

    def __init__(self, directory: Directory, links: Links, hidden: int, patience: Patience, clock: Clock) -> None:
        self._directory, self._links, self._patience, self._clock = directory, links, patience, clock
        self._servers = Servers()
        self._probes = Probes(links, self._servers, hidden)
        self._table = directory.table()
        self._me = own_identity()
        self._waited_s = 0.0  # for replies, in all
        self._turned_away = False  # while waiting: some part is best sent again only after a while
        self._started: set[Call] = set()  # and are still wanted

    def connect(self, deadline_s: float) -> None:
        """Connect to all servers, and have each reply once; those that do not are doubted."""
        servers = sorted(self._newest_table().servers())
        self._probes.start(servers, self._table.epoch, self._me)
        self._probes.hear(deadline_s)

    def start(self, call: Call) -> None:
        """Send what can be sent.

        Raises:
            InputError: a request does not fit a server's slot; nothing of the call is under way then.
        """
        self._started.add(call)
        try:
            self._probe()
            self._send(call)
        except BaseException:
            self.cancel(call)
            raise

    def finish(self, call: Call, deadline_s: float) -> Floats:
        """Wait until all is summed up.

        Raises:
            EngineError: it is not by the deadline.
            InputError: a server finds a request malformed, or one does not fit its slot.
        """
        try:
            while True:
                if call.problem is not None:
                    raise call.problem
                if call.unsent:
                    self._send(call)
                if call.is_done:
                    return call.total()
                now_s = self._clock.now()
                self._wait(call, now_s, min(deadline_s, now_s + LOOK_S))
                if now_s >= deadline_s and not call.is_done:  # what had come by then was taken
                    raise EngineError(self._explain(call))
        finally:
            self.cancel(call)

    def cancel(self, call: Call) -> None:
        """Want nothing more of a call."""
        self._started.discard(call)
        for flight in tuple(call.flying):
            self._withdraw(call, flight, "the call was given up")

    def close(self) -> None:
        """Leave all connections to others."""
        self._probes.close()
        self._links.close()

    # --- sending ------------------------------------------------------------------------------------

    def _send(self, call: Call) -> None:
        """Send what is unsent; parts that nobody can be asked for now stay so."""
        table = self._newest_table()
        parts, call.unsent = call.unsent, []
        while parts:
            part = parts.pop()
            if len(part.ids) > table.tokens:  # it was cut by an older table
                parts += cut(part, table.tokens)
                continue
            chosen = choose(part, table.owners[call.layer], self._servers, table.epoch)
            for piece, server in split(part, chosen):
                if server is None:
                    call.unsent.append(piece)
                elif (problem := self._post(call, piece, server)) is not None:
                    (parts if self._unreached(server, problem) else call.unsent).append(piece)

    def _post(self, call: Call, part: Part, server: Server) -> Exception | None:
        """Send a part; None, or why its server cannot be reached."""
        epoch = self._table.epoch
        try:
            link = self._links.take(server)
        except (EngineError, WireError) as error:
            return error
        try:
            pending = link.post(call.request(part, epoch, self._me))
        except BaseException:
            link.close()
            raise
        call.flying.append(Flight(part, server, epoch, self._waited_s, link, pending))
        self._servers.sent(server, part.pairs)
        return None

    def _unreached(self, server: Server, problem: Exception) -> bool:
        """A connection could not be made; whether to ask somebody else at once."""
        if isinstance(problem, FullError) and (self._servers.load(server)[0] or self._links.is_free(server)):
            return False  # it is there, and this client has slots of it: it need but wait for one
        return self._lose(server, problem)

    def _newest_table(self) -> RoutingTable:
        table = self._directory.table()
        if table is not self._table:
            self._table = table
            self._servers.updated(table.epoch)
            for server in self._servers.idle() - table.servers():
                self._links.drop(server)
                self._probes.drop(server)
                self._servers.forget(server)
        return table

    # --- hearing ------------------------------------------------------------------------------------

    def _wait(self, call: Call, now_s: float, until_s: float) -> None:
        """Hear what comes by then; parts that nobody can be asked for wait for a newer table, or a slot."""
        self._turned_away, hear_until_s = not call.flying, until_s
        for flight in tuple(call.flying):
            if not self._hear(call, flight, hear_until_s) or call.unsent:
                hear_until_s = 0.0  # of the others, take what is there: it was long, or there is something to send
        if self._turned_away:
            self._directory.await_newer(self._table, until_s)
            self._hear_others(call)
        self._waited_s += self._clock.now() - now_s
        if not call.is_done:
            self._lose_patience(call)
            self._probe()

    def _hear_others(self, call: Call) -> None:
        """Take what came for other calls: the slot that this one waits for may be theirs."""
        for other in self._started - {call}:
            try:
                for flight in tuple(other.flying):
                    self._hear(other, flight, 0.0)
            except InputError as error:
                other.problem = error
                self.cancel(other)

    def _hear(self, call: Call, flight: Flight, until_s: float) -> bool:
        """Wait for a reply; whether its server is done with the request."""
        try:
            reply = flight.pending.look(until_s)
            if reply is None:
                return False
            self._take(call, flight, reply)
        except (EngineError, WireError) as error:
            self._fail(call, flight, error)
        return True

    def _fail(self, call: Call, flight: Flight, problem: Exception) -> None:
        """A server did not compute a part, or there is no connection to it."""
        call.returned(flight, str(problem))
        self._servers.ended(flight.server, flight.part.pairs)
        flight.link.close()
        ask_at_once = self._unreached(flight.server, problem)
        if not ask_at_once and (isinstance(problem, FullError) or not self._others_can(call.layer, flight)):
            self._turned_away = True

    def _take(self, call: Call, flight: Flight, reply: Reply) -> None:
        """A reply came."""
        if reply.status is Status.MALFORMED:
            raise InputError(
                f"expert server {flight.server.name} finds a request malformed: it is of another model, or its slots "
                "are too small; its log says more"
            )
        if reply.status is Status.COMPUTED:
            if reply.sums.shape != call.shape(flight.part):
                raise WireError(f"sums {reply.sums.shape} for {call.shape(flight.part)}")
            call.summed(flight, reply.sums)
        else:
            call.returned(flight, f"its experts changed at epoch {reply.epoch}")
            self._outdated(flight, reply)
        self._servers.ended(flight.server, flight.part.pairs)
        self._links.give_back(flight.server, flight.link)
        self._servers.judge(flight.server, Standing.GOOD)

    def _outdated(self, flight: Flight, reply: Reply) -> None:
        """The server does not hold what the table says: ask it again by a newer one."""
        self._servers.outdated(flight.server, max(reply.epoch, flight.epoch + 1))
        self._directory.await_newer(self._table, 0.0)

    # --- doubts -------------------------------------------------------------------------------------

    def _lose_patience(self, call: Call) -> None:
        """Doubt servers that are late, and ask others where there are good ones for all of a part."""
        late_s = self._waited_s - self._patience.reply_s
        for flight in tuple(call.flying):
            if flight.waited_s <= late_s:
                why = f"no reply in {self._patience.reply_s} s"
                if self._servers.judge(flight.server, Standing.SUSPECT, why):
                    self._directory.doubt(flight.server, gone=False)
                if self._others_can(call.layer, flight):
                    self._withdraw(call, flight, why)

    def _others_can(self, layer: int, flight: Flight) -> bool:
        owners, epoch = self._table.owners[layer], self._table.epoch
        return all(self._servers.is_good(owners[expert], epoch) for expert in flight.part.counts)

    def _probe(self) -> None:
        self._probes.hear()
        due = self._servers.to_probe(self._clock.now(), self._patience.probe_s)
        self._probes.start(due, self._table.epoch, self._me)

    def _withdraw(self, call: Call, flight: Flight, why: str) -> None:
        flight.pending.withdraw()
        call.returned(flight, why)
        self._servers.ended(flight.server, flight.part.pairs)
        self._links.give_back(flight.server, flight.link)

    def _lose(self, server: Server, problem: Exception) -> bool:
        """Ask others from now on; whether the server was not lost already."""
        self._links.drop(server)
        news = self._servers.judge(server, Standing.LOST, str(problem))
        if news:
            self._directory.doubt(server, gone=isinstance(problem, GoneError))
            self._directory.await_newer(self._table, 0.0)
        return news

    def _explain(self, call: Call) -> str:
        """Which experts are missing, and what is thought of their servers."""
        parts = [*call.unsent, *(flight.part for flight in call.flying)]
        experts = sorted({expert for part in parts for expert in part.counts})
        owners = {server for expert in experts for server in self._table.owners[call.layer][expert]}
        said = ", ".join(self._servers.describe(server, self._table.epoch) for server in sorted(owners))
        failed = ", ".join(f"{name}: {why}" for name, why in call.failures.items())
        return (
            f"layer {call.layer}: no reply by the deadline for experts {experts[:8]}{'...' if experts[8:] else ''}; "
            f"their servers, at epoch {self._table.epoch}: {said or 'none'}{failed and '; failed: '}{failed}"
        )
