"""The longest that large bodies hold up the gateway's loop, on which everyone's tokens wait.

    python bench/large_bodies.py [--mebibytes 1 16 61] [--requests 3]

A gateway runs in this process, its workers and its clients in others.  A callback that asks to be called again at once
measures every turn of the loop: by the wall clock, which on a busy machine shows other processes as well, and by the
CPU time of the loop's thread, which shows the gateway, and the kernel's work for it, alone.  The first row is without
large bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.config import GatewayConfig
from coterie.gateway.server import serving, settle
from gateway import build, workers

MIB = 1 << 20


@dataclass
class Ticker:
    """Measures the turns of the running loop."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    running: bool = True

    def start(self) -> None:
        """Begin with the next turn."""
        self._loop = asyncio.get_running_loop()
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self.wall_s, self.cpu_s = max(self.wall_s, wall - self._wall), max(self.cpu_s, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
        if self.running:
            self._loop.call_soon(self._tick)


def body_of(prompt: str) -> bytes:
    return b'{"model": "tiny", "messages": %b, "max_tokens": 2, "stream": false}' % prompt.encode()


def one_string(size: int) -> bytes:
    return body_of(json.dumps([{"role": "user", "content": "word " * (size // 5)}]))


def escapes(size: int) -> bytes:
    return body_of('[{"role": "user", "content": "%s"}]' % ('\\u00e9\\n\\"' * (size // 10)))


def messages(size: int) -> bytes:
    return body_of(json.dumps([{"role": "user", "content": "a word or two"}] * (size // 46)))


def brackets(size: int) -> bytes:
    return body_of("[%s0]" % ("[[[[[]]]]]," * (size // 11)))


def token_ids(size: int) -> bytes:
    rng = random.Random(0)  # noqa: S311  (load, not secrets)
    ids = ",".join(str(rng.randrange(1000, 150_000)) for _ in range(MIB))
    return body_of("[" + ",".join([ids] * max(size // len(ids), 1)) + "]")


def reply_of(ids: int) -> bytes:
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "r-1",
        "remote_block_ids": [list(range(1_000_000, 1_000_000 + ids))],
    }
    return json.dumps(
        {"id": "x", "choices": [], "usage": {"prompt_tokens": ids}, "kv_transfer_params": params}
    ).encode()


BODIES: dict[str, Callable[[int], bytes]] = {
    "one string": one_string,
    "token ids": token_ids,
    "escapes": escapes,
    "messages": messages,
    "brackets": brackets,
}


async def hold(folder: Path, body: bytes, requests: int) -> tuple[Ticker, float]:
    """Serve requests with this body; the longest turn of the loop, and seconds for a request."""
    (folder / "body.json").write_bytes(body)
    with workers(folder, 0) as ports:
        prefill, *decodes = [f"http://127.0.0.1:{port}" for port in ports]
        config = GatewayConfig(
            prefill=(prefill,), decode=tuple(decodes), port=0, admin_port=0, log_requests=False, shutdown_grace_s=1
        )
        async with serving(config, VllmNixl()) as served:
            port = served.url.rpartition(":")[2]
            load = ["-p", port, "-c", "1", "-n", str(requests), "-f", str(folder / "body.json")]
            settle()
            start_s = time.perf_counter()
            client = await asyncio.create_subprocess_exec(folder / "lg", *load, stdout=subprocess.PIPE)
            ticker = Ticker()
            ticker.start()  # not before: to start a process takes longer than any turn
            output, _ = await client.communicate()
            ticker.running = False
            result = json.loads(output)
            if result["errs"] or result["non200"]:
                raise SystemExit(f"{len(body)} bytes: {result}")
            return ticker, (time.perf_counter() - start_s) / requests


def show(name: str, body: bytes, folder: Path, requests: int) -> None:
    ticker, seconds = uvloop.run(hold(folder, body, requests))
    turn = f"longest turn {ticker.wall_s * 1e3:6.2f} ms, CPU {ticker.cpu_s * 1e3:6.2f} ms"
    print(f"{name:20} {len(body) / MIB:7.2f} MiB   {turn}   {seconds:6.3f} s a request", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, nargs="*", default=[1, 16, 61])
    parser.add_argument("--requests", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        show("small bodies", (folder / "whole.json").read_bytes(), folder, 1000)
        for size in arguments.mebibytes:
            for kind, make in BODIES.items():
                show(kind, make(size * MIB), folder, arguments.requests)
        for size in arguments.mebibytes:
            (folder / "reply.json").write_bytes(reply_of(size * MIB // 9))
            show(f"reply of {size} MiB", (folder / "whole.json").read_bytes(), folder, arguments.requests)


if __name__ == "__main__":
    main()
