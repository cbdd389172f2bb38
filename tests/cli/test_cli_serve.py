"""`coterie serve` as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class _Worker(BaseHTTPRequestHandler):
    """Both roles, one token at a time: waits for `release` before it decodes a request that says "slow"."""

    protocol_version = "HTTP/1.1"
    release = threading.Event()
    slow = threading.Event()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if b'"do_remote_decode":true' in body:
            self._answer(b'{"kv_transfer_params": {"remote_request_id": "r"}, "usage": {"prompt_tokens": 1}}')
            return
        if b"slow" in body:
            self.slow.set()
            self.release.wait(20)
        self._answer(b'{"choices": []}')

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def worker() -> Iterator[str]:
    _Worker.release.clear()
    _Worker.slow.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Worker)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    _Worker.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


class _Gateway:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def wait_until_ready(self) -> str:
        """Read what it prints up to its addresses; return the clients' URL."""
        assert self.process.stdout is not None
        while not any(line.startswith("admin") for line in self.lines):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.lines.append(line.rstrip())
        return next(line.split()[1] for line in self.lines if line.startswith("serving"))

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=90)
        return self.process.returncode, errors


@pytest.fixture
def serve() -> Iterator[type[_Gateway]]:
    started: list[_Gateway] = []

    def start(*arguments: str) -> _Gateway:
        started.append(_Gateway("--port", "0", "--admin-port", "0", *arguments))
        return started[-1]

    yield start  # type: ignore[misc]
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.process.kill()
        gateway.process.communicate()


def post(url: str, body: bytes) -> int:
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_it_says_what_it_serves_logs_no_content_and_finishes_running_requests_on_sigterm(serve, worker: str) -> None:  # type: ignore[no-untyped-def]
    gateway = serve("--prefill", worker, "--decode", worker, "--decode-policy", "least_load")
    url = gateway.wait_until_ready()
    assert [line.split()[0] for line in gateway.lines] == [
        "mode",
        "worker",
        "worker",
        "policy",
        "profile",
        "serving",
        "admin",
    ]
    assert "disaggregated, in vLLM's protocol (kv_transfer_params)" in gateway.lines[0]  # whichever engine speaks it
    assert "prefill: prefix, decode: least_load" in gateway.lines[3]
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(post(url, b'{"prompt": "slow secret"}')))
    asking.start()
    assert _Worker.slow.wait(20)
    gateway.process.send_signal(signal.SIGTERM)
    host, port = url.removeprefix("http://").split(":")
    asyncio.run(_refused(host, int(port)))
    _Worker.release.set()
    asking.join()
    code, errors = gateway.end()
    assert statuses == [200]
    assert code == 0
    assert '"status":200' in errors
    assert "secret" not in errors


async def _refused(host: str, port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except (ConnectionRefusedError, ConnectionResetError):  # reset: it was still in the backlog
            return
        writer.close()
        await asyncio.sleep(0.02)


def test_a_request_that_outlasts_the_grace_is_cut(serve, worker: str) -> None:  # type: ignore[no-untyped-def]
    gateway = serve("--prefill", worker, "--decode", worker, "--shutdown-grace-s", "0.2")
    url = gateway.wait_until_ready()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            post(url, b'{"prompt": "slow"}')
        except OSError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert _Worker.slow.wait(20)
    gateway.process.send_signal(signal.SIGINT)
    code, _ = gateway.end()
    asking.join()
    assert code == 0
    assert len(failures) == 1


def test_a_port_in_use_is_one_clear_error(serve, worker: str) -> None:  # type: ignore[no-untyped-def]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, errors = serve("--prefill", worker, "--decode", worker, "--port", port).end()
    assert code == 1
    assert f"port {port}" in errors
    assert "--port" in errors
    assert "Traceback" not in errors


def test_it_stops_while_it_waits_for_workers(serve) -> None:  # type: ignore[no-untyped-def]
    gateway = serve("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9")
    while "waiting for workers" not in (line := gateway.process.stderr.readline()):
        assert line
    gateway.process.send_signal(signal.SIGTERM)
    code, errors = gateway.end()
    assert code == 0
    assert "Traceback" not in errors


def test_settings_come_from_a_file_too_and_a_wrong_one_is_named(serve, worker: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "serve.yaml"
    file.write_text(f"prefill: [{worker}]\ndecode: [{worker}]\ndecode_policy: random\nlog_requests: false\n")
    gateway = serve("--config", str(file))
    assert post(gateway.wait_until_ready(), b'{"prompt": "x"}') == 200
    assert "decode: random" in gateway.lines[3]
    gateway.process.send_signal(signal.SIGTERM)
    code, errors = gateway.end()
    assert code == 0
    assert '"status"' not in errors
    file.write_text("prefil: []\n")
    code, errors = serve("--config", str(file)).end()
    assert code == 1
    assert "prefil" in errors
    code, errors = serve("--prefill", worker, "--decode", worker, "--decode-policy", "best").end()
    assert code == 1
    assert "'best'" in errors


def test_sighup_reads_the_file_again_and_a_bad_one_changes_nothing(serve, worker: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "serve.yaml"
    text = f"prefill: [{worker}]\ndecode: [{worker}]\ndecode_policy: random\n"
    file.write_text(text)
    gateway = serve("--config", str(file), "--tau", "0.3")
    url = gateway.wait_until_ready()
    log = iter(gateway.process.stderr.readline, "")
    file.write_text(text + "max_body_bytes: 4\ntau: 0.9\n")  # the flag counts more
    gateway.process.send_signal(signal.SIGHUP)
    said = next(line for line in log if "configuration 2 is in effect" in line)
    assert "settings=('max_body_bytes',)" in said
    assert post(url, b'{"prompt": "x"}') == 413
    file.write_text(text + "seed: 9\n")
    gateway.process.send_signal(signal.SIGHUP)
    assert "seed: cannot change" in next(line for line in log if "reload refused" in line)
    assert post(url, b'{"prompt": "x"}') == 413
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.end()[0] == 0
