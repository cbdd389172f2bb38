"""A client by NIXL on a host of its own: a call for each line that it is given; prints the sums, or an error.

Arguments: name of the host, and what `NixlClient` is given.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
import network_hosts
from coterie.errors import CoterieError
from coterie.experts.protocol import Request
from coterie.experts.transport.nixl import NixlClient

network_hosts.enter(sys.argv[1])
client = None
while sys.stdin.readline():
    try:
        client = client or NixlClient(*sys.argv[2:])
        hidden = np.random.default_rng(0).standard_normal((40, client.shape.hidden), np.float32)
        request = Request(0, 0, 7, hidden, np.ones((40, 2), np.int32), np.ones((40, 2), np.float32))
        print(client.call(request, timeout_s=60).sums.tobytes().hex(), flush=True)
    except CoterieError as error:
        client = None
        print(error, flush=True)
