"""Expert servers in threads of the test's process, and a directory that knows them."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

from coterie.experts.client import RoutingTable, Server
from coterie.experts.protocol import SlotShape
from coterie.experts.server import ExpertServer, ModelingKernel, load_experts, parse_experts
from coterie.experts.transport import Intake, SharedServer
from coterie.modeling.expert_tensors import ExpertFiles


class FixedDirectory:
    """Servers that never change."""

    def __init__(self, table):
        self._table = table

    def table(self):
        return self._table

    def await_newer(self, table, until_s):
        time.sleep(max(0.0, until_s - time.monotonic()))

    def doubt(self, server, *, gone):
        pass


def known_model(checkpoint):
    """What a client knows of its model."""
    files = ExpertFiles.open(checkpoint)
    return SimpleNamespace(geometry=files.model.geometry, hidden=files.model.hidden, fingerprint=files.fingerprint())


@contextlib.contextmanager
def serving(checkpoint, *experts, kernel=None, tokens=64):
    """A directory of servers that have these experts of a checkpoint, each as `parse_experts` reads them."""
    files, over = ExpertFiles.open(checkpoint), threading.Event()
    geometry, threads, shared, held = files.model.geometry, [], [], {}
    for number, some in enumerate(experts):
        kernel_ = ModelingKernel(kernel)
        server = ExpertServer(files.model, kernel_, load_experts(files, parse_experts(some, geometry), kernel_))
        sizes = tokens, files.model.hidden, geometry.top_k, geometry.layers, geometry.experts
        shape = SlotShape(*sizes, fingerprint=bytes.fromhex(files.fingerprint()))
        shared.append(SharedServer(shape, slots=2))
        held[Server(f"server {number}", str(shared[-1].path))] = server.holding.held
        threads.append(threading.Thread(target=_serve, args=(shared[-1], server, over)))
        threads[-1].start()
    try:
        yield FixedDirectory(RoutingTable.of(geometry, held, epoch=0, tokens=tokens))
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for one in shared:
            one.close()


def _serve(shared, server, over):
    intake = Intake(shared)
    while not over.is_set():
        intake.step(server.compute, 0.02)
