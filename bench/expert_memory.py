#!/usr/bin/env python3
"""Memory of a worker of the embedded engine that has its experts, and of one whose experts are in a server.

    .venv/bin/python bench/expert_memory.py [MODEL]

Both have answered one long prompt, so that experts that are there are in memory.  `Rss` and `Pss` are those of
`/proc/PID/smaps_rollup`; the file is that of the packed weights, which the worker maps.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import httpx
from processes import coterie

ROOT = Path(__file__).resolve().parent.parent
PROMPT = [100 + 7 * number % 3000 for number in range(500)]
FIGURE = re.compile(r"^(Pss|Rss): +(\d+) kB$", re.MULTILINE)


def measure(model: Path, weights: Path, *options: str) -> None:
    """Print a worker's memory."""
    with coterie("engine", model, "--port", "0", "--weights-dir", weights, *options) as (url, process):
        body = {"model": model.name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
        figures = dict(FIGURE.findall(Path(f"/proc/{process}/smaps_rollup").read_text()))
    (file,) = weights.glob("weights-*.safetensors")
    rss, pss = (int(figures[name]) / 1024 for name in ("Rss", "Pss"))
    where, size = "in a server" if options else "its own", file.stat().st_size / 2**20
    print(f"experts {where:12} Rss {rss:7.1f} MiB  Pss {pss:7.1f} MiB  file {size:7.1f} MiB")


def main() -> None:
    model = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "models" / "coterie-tiny"
    fields = json.loads((model / "config.json").read_text())
    print(f"{model.name}: {fields['model_type']}")
    with tempfile.TemporaryDirectory() as folder:
        measure(model, Path(folder, "local"))
        with (
            coterie("experts", "monitor", "--port", "0") as (monitor, _),
            coterie("experts", "serve", model, "--monitor", monitor),
        ):
            measure(model, Path(folder, "remote"), "--experts-from", monitor)


if __name__ == "__main__":
    main()
