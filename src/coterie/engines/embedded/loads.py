"""Between the engine, which wants blocks filled, and the `Pulls`, which fill them."""

from __future__ import annotations

from functools import partial

from coterie.engines.embedded.engine import Engine
from coterie.engines.embedded.messages import RemoteKv
from coterie.engines.embedded.pulls import Pulls
from coterie.engines.embedded.request import LoadJob


class Loads:
    """Brings the engine's wishes for remote KV to the `Pulls`, and their outcome back.

    A request's remote KV is either pulled, once the engine has blocks for it, or dropped, if the request ends before.
    """

    def __init__(self, pulls: Pulls) -> None:
        self.pulls = pulls
        self._wanted: dict[str, RemoteKv] = {}

    def expect(self, request_id: str, remote: RemoteKv) -> None:
        """Before its submission: where the KV of a request waits."""
        self._wanted[request_id] = remote

    def start(self, engine: Engine, job: LoadJob) -> None:
        """Engine's thread: blocks wait to be filled."""
        done = partial(self._done, engine, job.request_id)
        self.pulls.start(self._wanted.pop(job.request_id), job.first, job.blocks, done)

    def forget(self, request_id: str) -> None:
        """The request was refused: whoever sent it still has the KV to give."""
        self._wanted.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """The request has ended."""
        remote = self._wanted.pop(request_id, None)
        if remote is not None:
            self.pulls.drop(remote)

    @staticmethod
    def _done(engine: Engine, request_id: str, problem: str | None) -> None:
        if problem is None:
            engine.loaded(request_id)
        else:
            engine.load_failed(request_id, problem)
