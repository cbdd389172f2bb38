"""An expert server that takes requests by shared memory and one more way, and is run step by step or by a thread."""

from __future__ import annotations

import contextlib
from threading import Event, Thread

import numpy as np

from coterie.experts.protocol import Dtype, Reply, Request, SlotShape, Status
from coterie.experts.transport import Intake, SharedServer
from running_monitor import until

SHAPE = SlotShape(tokens=4, hidden=8, top_k=2, layers=2, experts=4)
LARGE = SlotShape(tokens=4096, hidden=1024, top_k=2, layers=2, experts=4)  # 16 MiB, more than sockets hold
DEADLINE_S = 60


def request(value=1.0, shape=SHAPE, tokens=1, dtype=Dtype.FLOAT32):
    ids, weights = np.zeros((tokens, 2), np.int32), np.ones((tokens, 2), np.float32)
    return Request(0, 0, 7, np.full((tokens, shape.hidden), value).astype(dtype.numpy), ids, weights, dtype)


def doubled(requests):
    return [Reply(5, Status.COMPUTED, one.hidden + one.hidden, one.dtype) for one in requests]


class SteppedServer:
    """A server of both transports; a subclass opens the second one with the first one's segment."""

    def __init__(self, shape=SHAPE, slots=2):
        self.shared = SharedServer(shape, slots)
        self.other = self.open_other(slots)
        self.intake, self.over = Intake(self.shared, self.other), Event()

    def open_other(self, slots):
        raise NotImplementedError

    def has(self, client, pending):
        """Whether it has a client's request, for which no reply is there."""
        return pending.look(0) is None and self.intake.waiting

    def forgot(self, client):
        """Whether it heard that a client withdrew its request."""
        return not self.intake.waiting

    def step(self, compute=doubled):
        """One batch."""
        until(lambda: self.intake.step(compute, 1))

    @contextlib.contextmanager
    def running(self, compute=None):
        """A thread runs it, if it is told what to compute; closed in the end."""
        thread = Thread(target=self.run, args=(compute,))
        if compute:
            thread.start()
        try:
            yield self
        finally:
            self.over.set()
            if compute:
                thread.join()
            self.intake.close()

    def run(self, compute=doubled):
        while not self.over.is_set():
            self.intake.step(compute, 0.05)
