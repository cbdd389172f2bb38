"""NIXL, as far as it is needed here: registered memory, and transfers to and from that of another agent.

Its progress thread is off: it would compete with the threads that poll.  So transfers go on, and those of others are
served, only while somebody calls `Agent.progress` or looks at a transfer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from coterie.errors import EngineError, UnsupportedError, WireError

_log = logging.getLogger("coterie.experts")
_BACKEND = "UCX"
Operation = Literal["READ", "WRITE"]


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of memory.

    Attributes:
        address: where it begins, in its own process.
        size: bytes.
        kind: NIXL's name for where it is: DRAM, or VRAM of a GPU.
        device: number of that GPU.
    """

    address: int
    size: int
    kind: str = "DRAM"
    device: int = 0

    @classmethod
    def of(cls, memory: mmap.mmap) -> Region:
        """All of a mapping, which must live as long as what it is registered with."""
        return cls(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))

    def part(self, start: int, size: int) -> Region:
        """A piece of it."""
        return Region(self.address + start, size, self.kind, self.device)


class Agent:
    """One end of transfers.  For one thread at a time.

    Args:
        name: of it, different from those of all others.

    Attributes:
        name: see above.

    Raises:
        UnsupportedError: NIXL is not installed, or cannot be used here.
    """

    def __init__(self, name: str) -> None:
        self.name, nixl = name, _nixl()
        try:
            self._nixl = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
        except Exception as error:  # NIXL's errors have no base of their own
            raise UnsupportedError(f"NIXL cannot be used here: {error}") from error
        if _BACKEND not in self._nixl.backends:
            raise UnsupportedError(f"NIXL has no plugin for {_BACKEND} here; install its wheel anew")
        self._registered: list[Any] = []
        self._transfers: list[Transfer] = []
        # also where nobody closes it: Python may drop the parts in an order that NIXL does not survive
        self._end = weakref.finalize(self, _end, self._nixl, self._transfers, self._registered)

    def register(self, region: Region) -> None:
        """Have others, or this agent's own transfers, reach a region.

        Raises:
            UnsupportedError: this memory cannot be registered.
        """
        piece = region.address, region.size, region.device, ""
        try:
            self._registered.append(self._nixl.register_memory([piece], region.kind))
        except Exception as error:
            raise UnsupportedError(f"NIXL cannot register {region.size} bytes of {region.kind}: {error}") from error

    def invitation(self, place: int) -> bytes:
        """What another agent needs to reach this one, and the region that was registered as number `place`, alone."""
        return bytes(self._nixl.get_partial_agent_metadata(self._registered[place], True, [_BACKEND]))

    def meet(self, invitation: bytes) -> str:
        """Get to know another agent.

        Returns:
            Its name.

        Raises:
            WireError: the invitation is none.
        """
        try:
            name = self._nixl.add_remote_agent(invitation)
        except Exception as error:
            raise WireError(f"NIXL cannot read the other side's metadata: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def transfer(self, operation: Operation, peer: str, pieces: Iterable[tuple[Region, Region]]) -> Transfer:
        """Prepare a transfer.

        Args:
            operation: WRITE to the other agent, or READ from it.
            peer: the name of the other agent.
            pieces: here, there, of one size.

        Raises:
            EngineError: the other agent does not have this memory.
        """
        sides = zip(*pieces, strict=True)
        try:
            here, there = (self._nixl.get_xfer_descs([_place(one) for one in side], side[0].kind) for side in sides)
            handle = self._nixl.initialize_xfer(operation, here, there, peer)
        except Exception as error:
            raise EngineError(f"NIXL cannot prepare a {operation}: {error}") from error
        transfer = Transfer(self._nixl, handle)
        self._transfers.append(transfer)
        return transfer

    def progress(self) -> None:
        """Serve the transfers of others, where the network needs this process for it."""
        self._nixl.get_new_notifs()

    def close(self) -> None:
        """End all transfers; afterwards nothing writes to the registered memory any more."""
        del self._nixl
        self._end()


class Transfer:
    """A one-sided transfer, which can be made again and again, but not while it is under way."""

    def __init__(self, nixl: Any, handle: Any) -> None:
        self._nixl, self._handle, self._under_way = nixl, handle, False

    def start(self) -> None:
        """Begin; `is_done` says when it has been made.

        Raises:
            EngineError: the other side cannot be reached.
        """
        assert not self._under_way, "NIXL loses a transfer that is posted again before it is done"
        self._under_way = True
        try:
            self._note(self._nixl.transfer(self._handle))
        except Exception as error:
            raise EngineError(f"NIXL: {error}") from error

    def is_done(self) -> bool:
        """Whether all has arrived; makes progress.

        Raises:
            EngineError: the other side cannot be reached any more.
        """
        if self._under_way:
            try:
                self._note(self._nixl.check_xfer_state(self._handle))
            except Exception as error:
                raise EngineError(f"NIXL: {error}") from error
        return not self._under_way

    def end(self) -> None:
        """Give it up, be it under way or not."""
        try:
            self._handle.release()
        finally:
            del self._nixl, self._handle

    def _note(self, state: str) -> None:
        if state == "ERR":
            raise ConnectionError("the transfer failed")
        self._under_way = state != "DONE"


def _end(nixl: Any, transfers: list[Transfer], registered: list[Any]) -> None:
    """End each of them, whatever becomes of the others; what NIXL does not give up now it does with the agent."""
    for transfer in transfers:
        _try("a transfer", transfer.end)
    for descriptors in registered:
        _try("memory", partial(nixl.deregister_memory, descriptors))


def _try(what: str, end: Callable[[], object]) -> None:
    try:
        end()
    except Exception as error:
        _log.warning("NIXL does not give up %s: %s", what, error)


def is_installed() -> bool:
    """Whether there is NIXL in this environment."""
    return importlib.util.find_spec("nixl") is not None


@cache
def _nixl() -> Any:
    loaded = "nixl" in sys.modules
    try:
        import nixl
    except (ImportError, OSError) as error:
        raise UnsupportedError(f"NIXL cannot be loaded: {error}; pip install 'coterie[nixl]'") from error
    if not loaded:  # by somebody who may want it so
        _keep_quiet()
    return nixl


def _keep_quiet() -> None:
    """Have NIXL's log go where others go, and not to the standard output, of which programs read what they are told."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        log.setLevel(logging.WARNING)


def _place(region: Region) -> tuple[int, int, int]:
    return region.address, region.size, region.device
