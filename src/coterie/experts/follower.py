"""Keeps a client's view of the expert servers true, by a connection to the monitor that is held."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from coterie.errors import EngineError
from coterie.experts.membership import Report
from coterie.experts.monitor.calls import HeldLines, RefusedError, ask, check_url
from coterie.experts.monitor.messages import Welcome
from coterie.experts.view import View

RETRY_S = 0.2
"""How long to wait before a monitor that is away is asked again."""
_END_S = 5.0
_log = logging.getLogger("coterie.experts")


class Follower:
    """Follows a monitor, and tells it of servers that do not answer; two threads, for which no request waits.

    While the monitor is away the view stays as it is.  After a break only the changes that were missed are sent.

    Args:
        monitor: its URL.
        name: of this client, for people.
        on_view: told of each new view, from the thread, before others see it.

    Attributes:
        problem: why the monitor is not followed now; empty while it is.

    Raises:
        ConfigError: `monitor` is no URL.
    """

    def __init__(self, monitor: str, name: str, on_view: Callable[[View], None] = lambda _: None) -> None:
        check_url(monitor)
        self._monitor, self._name, self._on_view = monitor, name, on_view
        self._view = View()
        self._news = threading.Condition()
        self._lines: HeldLines | None = None
        self.problem = ""
        self._closed = threading.Event()
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._follow, "coterie-expert-members"), (self._report, "coterie-expert-reports"))
        ]

    @property
    def view(self) -> View:
        """What is known now."""
        return self._view

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def await_newer(self, view: View, timeout_s: float) -> View:
        """The view, as soon as it is another one than this, or when the time is over."""
        with self._news:
            self._news.wait_for(lambda: self._view is not view, timeout_s)
        return self._view

    def report(self, server: str, *, dead: bool) -> None:
        """Tell the monitor of a server that does not answer, by its id.

        Args:
            server: its id.
            dead: whether it is certain that its process is gone.
        """
        self._reports.put(Report(server, self._name, dead))

    def close(self) -> None:
        """End."""
        self._closed.set()
        self._reports.put(None)
        if lines := self._lines:
            lines.cut()
        for thread in self._threads:
            thread.join(_END_S)

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                with HeldLines(self._monitor, self._view.run, self._view.epoch) as self._lines:
                    self._take_all(self._lines)
                problem = f"the expert monitor at {self._monitor} ended the connection"
            except EngineError as error:
                problem = str(error)
            if not self._closed.wait(RETRY_S) and problem != self.problem:
                _log.warning("%s; going on with the servers that are known", problem)
                self.problem = problem

    def _take_all(self, lines: HeldLines) -> None:
        for message in lines:
            if self.problem:
                _log.info("the expert monitor is back")
                self.problem = ""
            view = self._view.apply(message)
            if view is not self._view:
                self._on_view(view)
                with self._news:
                    self._view = view
                    self._news.notify_all()
            if self._closed.is_set():
                return

    def _report(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                ask(self._monitor, "POST", "/report", Welcome, report)
            except RefusedError:
                continue  # it knows already that the server is gone
            except EngineError as error:
                _log.warning("could not report an expert server: %s", error)
