"""Keeps an expert server known to its monitor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from coterie.errors import EngineError
from coterie.experts.members import Held, Phase, Server
from coterie.experts.membership import Leave, Register
from coterie.experts.monitor.calls import RefusedError, ask, check_url
from coterie.experts.monitor.messages import Load, Pulse, Welcome

RETRY_S = 0.5
"""How long to wait before a monitor that is away, or says no, is asked again."""
_LEAVE_S = 5.0
_log = logging.getLogger("coterie.experts")


@dataclass(frozen=True, slots=True)
class Account:
    """What a server says of itself at present; `server.since` is not read."""

    server: Server
    phase: Phase
    load: Load | None = None


class Registrant:
    """What a server says to its monitor next: the rules of `Registration`, without its thread."""

    def __init__(self) -> None:
        self._known: Held | None = None  # experts with which the present monitor knows the server
        self._of: Held | None = None  # experts that the last welcome was for
        self._welcome: Welcome | None = None

    @property
    def registered(self) -> bool:
        """Whether the monitor knows the server, as far as the server knows."""
        return self._known is not None

    @property
    def welcome(self) -> Welcome | None:
        """The monitor's last answer; None before the first."""
        return self._welcome

    def message(self, account: Account) -> Register | Pulse:
        """A heartbeat, or a registration if the monitor does not know the server with these experts."""
        server = account.server
        if self._known == server.held:
            return Pulse(server.id, account.phase, account.load)
        since = self._welcome.since if self._welcome and self._of == server.held else 0
        seen = self._welcome.epoch if self._welcome else 0
        return Register(replace(server, since=since), account.phase, seen)

    def welcomed(self, account: Account, welcome: Welcome) -> None:
        """The monitor took the message."""
        self._known = self._of = account.server.held
        self._welcome = welcome

    def unknown(self) -> bool:
        """The monitor does not know the server; whether that is news, so that it should register at once."""
        known, self._known = self._known, None
        return known is not None


class Registration:
    """Registers a server, sends its heartbeats, and registers it again where the monitor asks for that.

    All of it is done by one thread, which no request waits for: without a monitor a server goes on as it is.

    Args:
        monitor: its URL.
        account: what the server is now; called from the thread.
        on_welcome: told of each answer, from the thread: since when the server has its experts, and whether it is
            needed; None to tell nobody.

    Raises:
        ConfigError: `monitor` is no URL.
    """

    def __init__(self, monitor: str, account: Callable[[], Account], on_welcome: Callable[[Welcome], None]) -> None:
        check_url(monitor)
        self._monitor, self._account, self._on_welcome = monitor, account, on_welcome
        self._registrant, self._problem = Registrant(), ""
        self._changed, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="coterie-expert-heartbeat", daemon=True)

    @property
    def welcome(self) -> Welcome | None:
        """The monitor's last answer; None before the first."""
        return self._registrant.welcome

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self) -> None:
        """Say at once what has changed: the phase or the experts."""
        self._changed.set()

    def close(self) -> None:
        """Say that the server leaves, and end; waits a few seconds at most."""
        self._closed.set()
        self._changed.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._changed.wait(self._turn())
            self._changed.clear()
        self._leave()

    def _turn(self) -> float:
        """Say what there is to say; returns how long to wait for the next time."""
        account = self._account()
        message = self._registrant.message(account)
        path = "/register" if isinstance(message, Register) else "/heartbeat"
        try:
            welcome = ask(self._monitor, "POST", path, Welcome, message)
        except RefusedError as error:
            if error.status == 404 and self._registrant.unknown():
                return 0.0
            return self._failed(f"the expert monitor refuses this server: {error}")
        except EngineError as error:
            return self._failed(str(error))
        self._take(account, welcome)
        return welcome.heartbeat_s

    def _take(self, account: Account, welcome: Welcome) -> None:
        if self._problem:
            _log.info("the expert monitor is back")
            self._problem = ""
        self._registrant.welcomed(account, welcome)
        self._on_welcome(welcome)

    def _failed(self, problem: str) -> float:
        if problem != self._problem:
            _log.warning("%s", problem)
            self._problem = problem
        return RETRY_S

    def _leave(self) -> None:
        if self._registrant.registered:
            try:
                ask(self._monitor, "POST", "/leave", Welcome, Leave(self._account().server.id))
            except EngineError as error:
                _log.warning("left without the expert monitor's knowing: %s", error)
