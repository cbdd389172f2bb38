"""Hosts on one machine, for tests: network namespaces with links between them, each process with its own `/dev/shm`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from coterie.shm import FOLDER
from waiting import wait_until

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
    _call("mount", b"none", b"/sys", b"sysfs", 0, None)  # which shows the network's devices


class Host:
    """One host, which has one link; the hub of several has none of its own.

    Attributes:
        name: of its network namespace.
        address: of its end of the link.
        peer: the address of the other end.
    """

    def __init__(self, name: str, address: str, peer: str, far_end: tuple[str, str] | None = None) -> None:
        self._far_end = far_end  # of the link: its namespace and device
        self.name = name
        self.address = address
        self.peer = peer
        self._inside = ThreadPoolExecutor(4, initializer=_join_network, initargs=(name,))

    def set_link(self, state: str) -> None:
        """Switch its end of the link `up` or `down`; what is sent then is lost, and nobody is told."""
        _run("ip", "-n", self.name, "link", "set", "pair", state)
        if state == "up" and self._far_end is not None:
            _await_link(self.name, "pair")
            _await_link(*self._far_end)

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
    if not shutil.which("tc"):
        raise PermissionError("tc (iproute2) is not installed")
    with _namespaces(2) as names:
        _link(*names, "pair")
        hosts = (
            Host(names[0], "10.99.0.1", "10.99.0.2", (names[1], "pair")),
            Host(names[1], "10.99.0.2", "10.99.0.1", (names[0], "pair")),
        )
        for host in hosts:
            _bring_up(host.name, "pair", host.address)
        _await_link(names[0], "pair")
        _await_link(names[1], "pair")
        slow = ("rate", "16mbit", "burst", "32kb", "latency", "400ms")
        _run("tc", "-n", names[0], "qdisc", "add", "dev", "pair", "root", "tbf", *slow)
        with contextlib.closing(hosts[0]), contextlib.closing(hosts[1]):
            yield hosts


@contextlib.contextmanager
def hub_and_spokes(count: int) -> Iterator[tuple[Host, list[Host]]]:
    """A host in the middle, and others, each of which has a link to it and to nobody else; the hub's address is any.

    Raises:
        PermissionError: as `two_hosts`.
    """
    with _namespaces(count + 1) as (middle, *names), contextlib.ExitStack() as open_hosts:
        hub = open_hosts.enter_context(contextlib.closing(Host(middle, "0.0.0.0", "")))
        spokes = []
        for number, name in enumerate(names, 1):
            near, far = f"10.99.{number}.1", f"10.99.{number}.2"
            _link(middle, name, f"spoke{number}")
            _bring_up(middle, f"spoke{number}", near)
            _bring_up(name, "pair", far)
            _await_link(middle, f"spoke{number}")
            _await_link(name, "pair")
            spokes.append(
                open_hosts.enter_context(contextlib.closing(Host(name, far, near, (middle, f"spoke{number}"))))
            )
        yield hub, spokes


@contextlib.contextmanager
def _namespaces(count: int) -> Iterator[list[str]]:
    if not shutil.which("ip"):
        raise PermissionError("ip (iproute2) is not installed")
    names = [f"coterie-{os.getpid()}-{number}" for number in range(count)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def _link(one: str, other: str, device: str) -> None:
    """A link between two namespaces; its end in the second one is called `pair`."""
    _run("ip", "link", "add", device, "netns", one, "type", "veth", "peer", "name", "pair", "netns", other)


def _bring_up(name: str, device: str, address: str) -> None:
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
    _run("ip", "-n", name, "link", "set", device, "up")


def _await_link(name: str, device: str) -> None:
    """Both ends being up, the kernel says so a moment later; some programs look once, at their start (UCX)."""

    def state() -> str:
        return subprocess.run(("ip", "-n", name, "link", "show", device), capture_output=True, text=True).stdout

    wait_until(lambda: " state UP " in state(), what=f"the link of {device} in {name}")
