"""The client's end: requests as steps, each of which is a transfer that must be done before the next one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator

from coterie.errors import EngineError, InputError, WireError
from coterie.experts.protocol import Reply, Request, State
from coterie.experts.protocol.rules import state_word
from coterie.experts.transport.nixl.agent import Agent, Transfer
from coterie.experts.transport.nixl.copy import SlotCopy
from coterie.experts.transport.nixl.handshake import Hold
from coterie.experts.transport.nixl.pace import Pace
from coterie.experts.transport.pending import Pending, PendingAt

CONNECT_S = 5.0
"""The longest that the first transfers may take, in which the agents connect."""
LONGEST_S = 0.001
"""The longest sleep between two looks for a reply."""
CHECK_S = 0.02
"""How often a waiting client looks whether it still has its slot."""
_Steps = Generator[Transfer | None, None, None]


class NixlClient:
    """A slot of a server on any host, for one request at a time.

    Each has an agent of its own, so that one whose server is lost ends with all that was under way, and none waits for
    another's connecting.

    Args:
        url: the server's HTTP side.
        server: id of the server that is meant.
        name: of it, for errors.
        unsent: clients of this thread with something that their server does not have yet.  While one waits for a reply,
            it sends for all; give the same set to clients that are used together.

    Attributes:
        shape: the most that a request can carry.

    Raises:
        UnsupportedError: NIXL is not installed, or cannot be used here.
        EngineError: the server cannot be reached, is another one, or has no slot.
        WireError: what is there is no expert server.
    """

    def __init__(self, url: str, server: str, name: str, unsent: set[NixlClient] | None = None) -> None:
        self._name = name
        self._unsent = set() if unsent is None else unsent
        self._agent: Agent | None
        self._agent, self._hold = _begin(url, server, name)
        self._steps: _Steps = self._take_back()
        self._transfer: Transfer | None = None
        self._pace = Pace(LONGEST_S, time.monotonic())
        invitation = self._hold.invitation
        self.shape, self._sequence = invitation.shape, invitation.sequence
        try:
            self._slot = SlotCopy(self._agent, invitation)
            self._warm_up(time.monotonic() + CONNECT_S)
        except BaseException:
            self.close()
            raise
        self._wanted = self._posted = 0
        self._reply: Reply | None = None
        self._problem: Exception | None = None

    def post(self, request: Request) -> Pending:
        """Send a request, and do not wait.  What is returned must be waited for or withdrawn before the next one.

        Its arrays must not change before.  What is not sent at once is sent while a client waits for a reply.

        Raises:
            InputError: the request does not fit the slot, or this client is closed.
        """
        if self._agent is None and self._problem is None:
            raise InputError(f"expert server {self._name}: this client is closed")
        assert not self._wanted, "the last request was neither taken nor withdrawn"
        self.shape.check_request(request)
        self._sequence = self._wanted = self._sequence + 1
        self._pace.reset(time.monotonic())
        self._go_on_with(self._exchange(self._sequence, request))
        return PendingAt(self, self._sequence, self._name)

    def call(self, request: Request, timeout_s: float) -> Reply:
        """Send a request and wait for its reply: `post`, then `Pending.wait`."""
        return self.post(request).wait(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Leave the slot to others."""
        self._unsent.discard(self)
        self._steps.close()
        self._transfer, self._wanted = None, 0
        agent, self._agent = self._agent, None
        try:
            if agent is not None:
                agent.close()
        finally:
            self._hold.close()

    def look(self, until_s: float) -> Reply | None:
        """The reply to the last request, if it comes by then; see `Pending.look`."""
        check_s = time.monotonic()
        while True:
            for client in (*self._unsent, self):
                client.go_on()
            if self._problem is not None:
                raise self._problem
            if self._reply is not None:
                reply, self._reply, self._wanted = self._reply, None, 0
                return reply
            now_s = time.monotonic()
            if now_s >= until_s:
                return None
            if now_s >= check_s:
                self._check()
                check_s = now_s + CHECK_S
            time.sleep(min(self._pace.sleep_s(now_s), until_s - now_s))

    def withdraw(self, sequence: int) -> None:
        """Want no reply to this request any more, if it is still wanted."""
        if self._wanted == sequence:
            self._wanted, self._reply = 0, None
            self._go_on_with(self._take_back())

    def go_on(self) -> None:
        """Take the steps that need no waiting; what fails is said when the reply is looked for."""
        try:
            while self._problem is None and (self._transfer is None or self._transfer.is_done()):
                self._transfer = next(self._steps, None)
                if self._transfer is None:
                    return
                self._transfer.start()
        except WireError as error:
            self._fail(error)
        except EngineError as error:
            self._fail(EngineError(f"expert server {self._name}: connection lost: {error}"))

    def _go_on_with(self, steps: _Steps) -> None:
        """Take other steps from now on; the transfer that is under way is finished before."""
        self._steps = steps
        if self._problem is None:
            self._unsent.add(self)
            self.go_on()

    # --- steps: each yields a transfer, and goes on when it is done, or None, to go on at the next look ---------

    def _exchange(self, sequence: int, request: Request) -> _Steps:
        """One request and its reply."""
        yield from self._forget()  # the last one may be withdrawn, and the server not know it yet
        yield self._slot.write(sequence, request)
        self._posted = sequence
        yield self._slot.store(State.READY, sequence)
        self._unsent.discard(self)
        yield self._slot.load
        while self._slot.loaded() != state_word(State.DONE, sequence):
            yield None
            yield self._slot.load
        yield self._slot.read(request.dtype, len(request.hidden))
        echoed, reply = self._slot.reply()
        if echoed != sequence:
            raise WireError(f"expert server {self._name}: reply to request {echoed} in the place of that to {sequence}")
        self._posted, self._reply = 0, reply  # and wanted until it is taken: who waits for another server may be here

    def _take_back(self) -> _Steps:
        """The withdrawal of one."""
        yield from self._forget()
        self._unsent.discard(self)

    def _forget(self) -> _Steps:
        """Have the server forget the last request, before its bytes change."""
        if self._posted:
            yield self._slot.store(State.FREE, self._posted)
            self._posted = 0

    # --- beginning and end ----------------------------------------------------------------------------

    def _warm_up(self, deadline_s: float) -> None:
        """Have the agents connect, which they do at the first transfer: write a state, and read it again."""
        for transfer in (self._slot.store(State.FREE, self._sequence), self._slot.load):
            transfer.start()
            while not transfer.is_done():
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    raise EngineError(f"expert server {self._name}: no transfer was made in {CONNECT_S} s")
                time.sleep(self._pace.sleep_s(now_s))
        if self._slot.loaded() != state_word(State.FREE, self._sequence):
            raise WireError(f"expert server {self._name}: what is written by NIXL is not what is read")

    def _check(self) -> None:
        try:
            self._hold.check()
        except EngineError as error:
            self._fail(error)

    def _fail(self, problem: Exception) -> None:
        """The slot is of no use any more."""
        self._problem = problem
        self.close()


def _begin(url: str, server: str, name: str) -> tuple[Agent, Hold]:
    """The agent first: where there can be none, no slot is taken for nothing."""
    agent = Agent(f"client-{secrets.token_hex(8)}")
    try:
        return agent, Hold(url, server, name)
    except BaseException:
        agent.close()
        raise
