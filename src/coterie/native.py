"""Libraries of compiled code beside the package's own files: which of them this processor can run.

`hatch_build.py` compiles a folder's `kernel.c` once for each level of instructions, where there is a compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

LEVELS = ("x86-64-v4", "x86-64-v3", "portable")
"""Instructions that a kernel is compiled for, best first; the last are those that the compiler takes for granted."""


Functions = Mapping[str, tuple[type | None, tuple[type, ...]]]
"""What each function of a library returns, and its arguments."""


def open_library(folder: Path, level: str, interface: int, functions: Functions) -> ctypes.CDLL | None:
    """The library of one of `LEVELS`; None if it was not built, or this processor lacks the instructions.

    Args:
        folder: where `kernel.c` is.
        level: one of `LEVELS`.
        interface: the version that `coterie_interface` of its source returns.
        functions: those that are called.
    """
    try:
        library = ctypes.CDLL(str(folder / f"kernel-{level}.so"))
    except OSError:  # not there, or for another system
        return None
    if library.coterie_interface() != interface:  # 0: instructions that are not there; else built from another kernel.c
        return None
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
