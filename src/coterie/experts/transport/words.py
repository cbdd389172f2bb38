"""Words of shared memory that several processes change: atomic operations, and waiting for a change without spinning.

Python has no atomic operations on memory.  They come from libatomic, which is part of GCC's runtime and needs no
compiler (https://gcc.gnu.org/wiki/Atomic/GCCMM); waiting comes from the kernel (`man 2 futex`).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from coterie.errors import UnsupportedError

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # between processes, so not the private ones
_ALL = 0x7FFFFFFF
_SEQUENTIAL = 5  # __ATOMIC_SEQ_CST
_WORD, _HALF = ctypes.c_uint64, ctypes.c_uint32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Words:
    """The words of one mapping, by their offset; 64 bits, or 32 where the name says so.

    Args:
        memory: mapped for reading and writing; cannot be closed while this object lives.

    Raises:
        UnsupportedError: libatomic is missing, or this is no Linux on x86-64 or ARM64.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._calls = _calls()
        self._keep = ctypes.c_char.from_buffer(memory)
        self._base = ctypes.addressof(self._keep)

    def load(self, offset: int) -> int:
        """The value."""
        return self._calls.load(self._base + offset, _SEQUENTIAL)

    def swap(self, offset: int, expected: int, new: int) -> bool:
        """Give it a new value if it has the expected one; whether it had."""
        found = _WORD(expected)
        address = self._base + offset
        return self._calls.swap(address, ctypes.byref(found), new, _SEQUENTIAL, _SEQUENTIAL)

    def load32(self, offset: int) -> int:
        """The value."""
        return self._calls.load32(self._base + offset, _SEQUENTIAL)

    def add32(self, offset: int, amount: int) -> None:
        """Add, modulo 2^32."""
        self._calls.add32(self._base + offset, amount & 0xFFFFFFFF, _SEQUENTIAL)

    def wait32(self, offset: int, value: int, timeout_s: float) -> None:
        """Sleep while it has this value, until `wake32`, a signal, or the time is over."""
        seconds, part = divmod(max(timeout_s, 0.0), 1.0)
        timeout = _Timespec(int(seconds), int(part * 1e9))
        self._calls.futex(self._base + offset, _FUTEX_WAIT, value, ctypes.byref(timeout))

    def wake32(self, offset: int) -> None:
        """Wake all who wait."""
        self._calls.futex(self._base + offset, _FUTEX_WAKE, _ALL, None)


@dataclass(frozen=True, slots=True)
class _Calls:
    load: Callable[..., int]
    swap: Callable[..., bool]
    load32: Callable[..., int]
    add32: Callable[..., int]
    futex: Callable[..., int]


@cache
def _calls() -> _Calls:
    """Atomic operations, which keep Python's lock since they are short, and the kernel's futex, which lets it go."""
    number = _SYS_FUTEX.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise UnsupportedError("shared-memory transport: needs Linux on x86-64 or ARM64; use another transport")
    try:
        atomic = ctypes.PyDLL("libatomic.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"shared-memory transport: {error}; install it (Debian: libatomic1, Fedora: libatomic), "
            "or use another transport"
        ) from error
    pointer, order, number_type = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    system_call = _declared(ctypes.CDLL(None), "syscall", number_type, number_type, pointer, order, _HALF, pointer)
    return _Calls(
        load=_declared(atomic, "__atomic_load_8", _WORD, pointer, order),
        swap=_declared(atomic, "__atomic_compare_exchange_8", ctypes.c_bool, pointer, pointer, _WORD, order, order),
        load32=_declared(atomic, "__atomic_load_4", _HALF, pointer, order),
        add32=_declared(atomic, "__atomic_fetch_add_4", _HALF, pointer, _HALF, order),
        futex=partial(system_call, number),
    )


def _declared(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return cast("Callable[..., Any]", function)
