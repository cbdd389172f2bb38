"""Two hosts on one machine, for tests: network namespaces with a link between them, each with `/dev/shm` of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from coterie.shm import FOLDER

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _join_network(name: str) -> None:
    """Move the calling thread, and those that it starts from now on."""
    with open(f"/run/netns/{name}", "rb") as namespace:
        _call("setns", namespace.fileno(), _CLONE_NEWNET)


def enter(name: str) -> None:
    """Have this process, which has one thread, live on a host."""
    _join_network(name)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"none", FOLDER.encode(), b"tmpfs", 0, None)


class Host:
    """One side of the link.

    Attributes:
        name: of its network namespace.
        address: of its end of the link.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._inside = ThreadPoolExecutor(4, initializer=_join_network, initargs=(name,))

    def ip(self, *arguments: str) -> None:
        _run("ip", "-n", self.name, *arguments)

    def set_link(self, state: str) -> None:
        """Switch its end of the link `up` or `down`."""
        self.ip("link", "set", "pair", state)

    def call(self, function, *arguments, **named):
        """What a function that opens connections gives here."""
        return self._inside.submit(function, *arguments, **named).result(60)

    def close(self) -> None:
        self._inside.shutdown()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with 16 Mbit/s from the first to the second.

    Raises:
        PermissionError: this machine does not allow or know it; the message says why.
    """
    if not shutil.which("ip") or not shutil.which("tc"):
        raise PermissionError("ip and tc (iproute2) are not installed")
    names = [f"coterie-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "pair", "netns", names[0], "type", "veth", "peer", "name", "pair", "netns", names[1])
        hosts = [Host(name, f"10.99.0.{number}") for number, name in enumerate(names, 1)]
        for host in hosts:
            host.ip("link", "set", "lo", "up")
            host.ip("addr", "add", f"{host.address}/24", "dev", "pair")
            host.set_link("up")
        slow = ("rate", "16mbit", "burst", "32kb", "latency", "400ms")
        _run("tc", "-n", names[0], "qdisc", "add", "dev", "pair", "root", "tbf", *slow)
        yield hosts[0], hosts[1]
        for host in hosts:
            host.close()
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)
