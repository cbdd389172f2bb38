"""Build hook: compiles what is written in C where there is a C compiler; without one numpy computes the same.

`COTERIE_NATIVE=0` leaves it out, `CC` names the compiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = tuple(Path("src", "coterie", name) for name in ("counting", "modeling"))
"""Each with a `kernel.c`."""

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
X86_64 = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
LEVELS = {"portable": (), **(X86_64 if platform.machine() in ("x86_64", "AMD64") else {})}


class KernelHook(BuildHookInterface[Any]):
    """Puts the kernels beside their source; a wheel that has any is for this platform alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is made, an editable one too."""
        root = Path(self.root)
        built = [file for folder in FOLDERS for file in build_all(root / folder, self.app.display_warning)]
        if built:
            build_data["artifacts"] += [f"/{file.relative_to(root)}" for file in built]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def build_all(folder: Path, warn: Any) -> list[Path]:
    """Compile each level for which that works; the others are removed, so that none is older than its source."""
    command = compiler()
    if not command:
        warn(f"coterie: no C compiler, or COTERIE_NATIVE=0: {folder.name} will run on numpy")
    built = []
    for level, flags in LEVELS.items():
        target = folder / f"kernel-{level}.so"
        if command and compile_one(folder / "kernel.c", target, (*command, *FLAGS, *flags), warn):
            built.append(target)
        else:
            target.unlink(missing_ok=True)
    return built


def compiler() -> list[str]:
    """The compiler's command; empty where there is none, or none is wanted."""
    command = shlex.split(os.environ.get("CC", "cc"))
    return command if os.environ.get("COTERIE_NATIVE") != "0" and shutil.which(command[0]) else []


def compile_one(source: Path, target: Path, command: tuple[str, ...], warn: Any) -> bool:
    """Compile to a file that takes the target's place when it is whole: processes may be running the old one."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kernel-") as folder:
        unfinished = Path(folder) / target.name
        result = subprocess.run([*command, source, "-o", unfinished], capture_output=True, text=True)
        if result.returncode:
            warn(f"coterie: {target.name} cannot be compiled: {result.stderr[-2000:]}")
            return False
        unfinished.replace(target)
    return True
