"""How many connections a process may have."""

from __future__ import annotations

import subprocess
import sys

LIMITED = """
import logging, resource, sys
from coterie.gateway.server import allow_descriptors
logging.basicConfig()
for connections in (10, 300, 500):
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1000))
    allow_descriptors(connections)
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_process_allows_itself_what_its_connections_may_need_and_says_if_it_cannot() -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    # 2 * 10 + 256 are allowed anyway; 2 * 300 + 256 may be; 2 * 500 + 256 may not.
    assert run.stdout.splitlines() == ["512 1000", "856 1000", "1000 1000"]
    (told,) = run.stderr.splitlines()
    assert "500 connections may need 1256" in told
