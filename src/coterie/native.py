"""Libraries of compiled code beside the package's own files: which of them this processor can run.

`hatch_build.py` compiles a folder's `kernel.c` once for each level of instructions, where there is a compiler.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

LEVELS = ("x86-64-v4", "x86-64-v3", "portable")
"""Instructions that a kernel is compiled for, best first; the last are those that the compiler takes for granted."""


def open_library(folder: Path, level: str, interface: int) -> ctypes.CDLL | None:
    """The library of one of `LEVELS`; None if it was not built, or this processor lacks the instructions.

    Args:
        folder: where `kernel.c` is.
        level: one of `LEVELS`.
        interface: the version that `coterie_interface` of its source returns.
    """
    try:
        functions = ctypes.CDLL(str(folder / f"kernel-{level}.so"))
    except OSError:  # not there, or for another system
        return None
    return functions if functions.coterie_interface() == interface else None  # else 0, or built from another kernel.c
