"""A client of expert servers as a process of its own: computes all the time, compares, and says what it saw.

    python expert_client.py MONITOR MODEL NAME [TOKENS] [IN_FLIGHT]

Prints one JSON line each 50 ms: calls that succeeded, those that failed or were wrong, and the servers in its table.
"""

import json
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from coterie.experts.client import Connector, MonitoredDirectory, RemoteExperts
from coterie.experts.protocol import Request
from coterie.experts.server import ExpertServer, ModelingKernel, load_experts, parse_experts
from coterie.modeling.expert_tensors import ExpertFiles

SAY_S = 0.05
PAUSE_S = 0.002  # so that clients leave something of the cores to others
DEADLINE_S = 10.0
TOKENS = 4
DIFFERENT = 64  # inputs, whose sums are computed beforehand
TOLERANCE = 1e-5  # of the largest value: partial sums are added in another order


def main(monitor, folder, name, tokens=TOKENS, in_flight=1):
    files = ExpertFiles.open(Path(folder))
    geometry, hidden = files.model.geometry, files.model.hidden
    calls = list(with_sums(files, inputs(geometry, hidden, int(tokens))))
    fingerprint = files.fingerprint()
    directory = MonitoredDirectory(monitor, geometry, fingerprint, name)
    directory.await_all(time.monotonic() + 30)
    experts = RemoteExperts(geometry, hidden, directory, Connector(fingerprint))
    report = {"done": 0, "wrong": 0, "failed": []}
    said_s, turn, flying = time.monotonic(), 0, deque()
    while True:
        while len(flying) < int(in_flight):
            call, expected = calls[turn % len(calls)]
            flying.append((time.monotonic(), experts.start(*call), expected))
            turn += 1
        began_s, call, expected = flying.popleft()
        try:
            sums = call.finish(began_s + DEADLINE_S)
            report["done"] += 1
            report["wrong"] += bool(np.abs(sums - expected).max() > TOLERANCE * np.abs(expected).max())
        except Exception as error:
            report["failed"].append(repr(error))
        time.sleep(PAUSE_S)
        now_s = time.monotonic()
        if now_s - said_s >= SAY_S:
            servers = sorted({server.address for server in directory.table().servers()})
            print(json.dumps({**report, "servers": servers}), flush=True)
            said_s = now_s


def inputs(geometry, hidden, tokens=TOKENS):
    rng = np.random.default_rng(0)
    for turn in range(DIFFERENT):
        rows = rng.standard_normal((tokens, hidden)).astype(np.float32)
        ids = np.array([rng.permutation(geometry.experts)[: geometry.top_k] for _ in rows], np.int32)
        yield turn % geometry.layers, rows, ids, rng.random(ids.shape).astype(np.float32)


def with_sums(files, calls):
    """Each call with what the experts make of it in this process."""
    kernel, held = ModelingKernel(), parse_experts("all", files.model.geometry)
    server = ExpertServer(files.model, kernel, load_experts(files, held, kernel))
    for layer, rows, ids, weights in calls:
        (reply,) = server.compute([Request(layer, 0, 1, rows, ids, weights)])
        yield (layer, rows, ids, weights), reply.sums


if __name__ == "__main__":
    main(*sys.argv[1:])
