"""Sends what the admin side's OpenAPI description allows, and what it does not, to a real gateway process.

    pip install schemathesis
    python scripts/fuzz_admin.py [--minutes 10] [--seed 1] [--schemathesis PATH]

schemathesis (https://schemathesis.readthedocs.io) makes requests of the description that the gateway itself serves:
valid and invalid ones, alone and in sequences, and compares each reply with what is described.  Workers are added,
drained and removed meanwhile, while a client sends proper requests; it must be served, or told clearly that no worker
is left.  Messages of peers, which are msgpack, it cannot make.  Ends with 1 if schemathesis found anything or the
gateway did what it must not (see `fuzz_http.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz_http import ANSWERED_S, Finding, Gateway, well

CONFIG = """\
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]  # /health and changes say 503 when no worker is left
"""

WITHOUT = "positive_data_acceptance"
"""A check that wants 2xx for whatever the schema allows: what a worker's URL is, no pattern says to the letter."""


async def fuzz(tool: str, minutes: float, seed: int) -> tuple[int, Counter[int]]:
    """Run schemathesis against a gateway over fake engines.

    Returns:
        Its exit status, and how often the proper client was answered with each status.

    Raises:
        Finding: the gateway ended, logged a traceback, or left the proper client waiting.
    """
    statuses: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "schemathesis.toml").write_text(CONFIG)
        gateway = Gateway(Path(folder))
        async with gateway.running():
            command = [
                tool, "run", f"{gateway.admin_url}/openapi.json", "--checks", "all",
                "--exclude-checks", WITHOUT, "--exclude-path", "/peers", "--max-time", str(int(60 * minutes)),
                "--seed", str(seed), "--request-timeout", str(ANSWERED_S), "--continue-on-failure",
            ]  # fmt: skip
            process = await asyncio.create_subprocess_exec(*command, cwd=folder, stderr=subprocess.STDOUT)
            try:
                while process.returncode is None:
                    gateway.check_alive()
                    statuses[await _served(gateway.port)] += 1
                    await asyncio.sleep(0.1)
            finally:
                if process.returncode is None:
                    process.kill()
            return await process.wait(), statuses


async def _served(port: int) -> int:
    try:
        async with asyncio.timeout(ANSWERED_S):
            status = await well(port)
    except (TimeoutError, OSError) as error:
        raise Finding(f"a proper client was not answered: {error!r}") from None
    if status not in (200, 503):
        raise Finding(f"a proper client got status {status}")
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", default="schemathesis", metavar="PATH", help="its command")
    options = parser.parse_args()
    if shutil.which(options.schemathesis) is None:
        sys.exit(
            f"{options.schemathesis}: there is no such command; pip install schemathesis, or say --schemathesis PATH"
        )
    start_s = time.monotonic()
    try:
        status, served = asyncio.run(fuzz(options.schemathesis, options.minutes, options.seed))
    except Finding as finding:
        sys.exit(f"found: {finding}")
    ends = ", ".join(f"{count} x {status}" for status, count in served.most_common())
    print(
        f"schemathesis ended with {status} after {time.monotonic() - start_s:.0f} s; a proper client meanwhile: {ends}"
    )
    sys.exit(status)


if __name__ == "__main__":
    main()
