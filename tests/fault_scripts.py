"""What is done to expert servers, clients and monitor, and when; played in simulation and on real processes.

Servers s0 and s1 hold one half of each layer's experts, s2 and s3 the other; clients are c0 and c1.
"""

from dataclasses import dataclass
from typing import Literal

SERVERS = {"s0": 0, "s1": 0, "s2": 1, "s3": 1}
"""Which half each server holds."""
CLIENTS = ("c0", "c1")


@dataclass(frozen=True)
class Step:
    """kill: SIGKILL.  stop, go on: SIGSTOP, SIGCONT.  slow, fast: computing takes longer.  drain: SIGTERM.

    cut, mend: nothing comes from or to the server's host, and nobody is told.
    """

    at_s: float
    what: Literal["kill", "stop", "go on", "slow", "fast", "drain", "start", "cut", "mend"]
    who: str


def _script(*steps):
    return tuple(Step(*step) for step in steps)


SCRIPTS = {
    "a server is killed": _script((1, "kill", "s0")),
    "a server is killed and started again": _script((1, "kill", "s0"), (2, "start", "s0")),
    "one server of each half is killed": _script((1, "kill", "s0"), (1.5, "kill", "s3")),
    "a server hangs and goes on": _script((1, "stop", "s1"), (4, "go on", "s1")),
    "a server is slow for a while": _script((1, "slow", "s2"), (4, "fast", "s2")),
    "a server drains and is started again": _script((1, "drain", "s3"), (3, "start", "s3")),
    "the monitor is killed and started again": _script((1, "kill", "monitor"), (3, "start", "monitor")),
    "a server is killed while the monitor is away": _script(
        (1, "kill", "monitor"), (2, "kill", "s0"), (3, "start", "monitor")
    ),
    "a server is started while the monitor is away": _script(
        (1, "kill", "s2"), (2, "kill", "monitor"), (2.5, "start", "s2"), (4, "start", "monitor")
    ),
    "the monitor hangs and goes on": _script((1, "stop", "monitor"), (5, "go on", "monitor")),
    "a client is killed": _script((1, "kill", "c0")),
    "servers are replaced one after the other": _script(
        *((1 + 1.5 * place, "drain", name) for place, name in enumerate(SERVERS)),
        *((2 + 1.5 * place, "start", name) for place, name in enumerate(SERVERS)),
    ),
}

CUTS = {
    "a server is cut off for a while": _script((1, "cut", "s1"), (4, "mend", "s1")),
    "one server of each half is cut off for so long that connections end": _script(
        (1, "cut", "s0"), (1, "cut", "s3"), (11, "mend", "s0"), (11, "mend", "s3")
    ),
    "a server is killed while another is cut off": _script(
        (1, "cut", "s0"), (2, "kill", "s3"), (5, "mend", "s0"), (6, "start", "s3")
    ),
}
"""What only hosts have done to them."""
