"""The connections to one worker: how it is addressed, and how long they count."""

from __future__ import annotations

import asyncio
import socket

import pytest
from stories import eventually, story

from coterie.gateway.legs import upstream
from coterie.gateway.legs.pool import Pool
from coterie.gateway.legs.upstream import Collected, Patience, UpstreamError


def can_be_had(host: str) -> bool:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("127.0.0.1", "127.0.0.1"),
        pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not can_be_had("::1"), reason="no IPv6 here")),
    ],
)
@story
async def test_the_host_header_is_the_urls_authority(host: str, written: str) -> None:
    heads: list[bytes] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(served, host, 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool("a worker", f"http://{written}:{port}", connect_timeout_s=5, keep_idle_s=5)
    await pool.get(b"/health", b"", Collected(1000), Patience(5, 5))
    assert heads[0].split(b"\r\n")[:2] == [b"GET /health HTTP/1.1", f"host: {written}:{port}".encode()]
    server.close()


@story
async def test_a_pool_is_busy_from_when_a_connection_is_opened_for_a_request() -> None:
    with socket.socket() as silent:  # takes no connection: its backlog is full
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with socket.create_connection(silent.getsockname()):
            pool = Pool("a worker", url, connect_timeout_s=0.2, keep_idle_s=5)
            asked = asyncio.create_task(pool.get(b"/health", b"", Collected(1000), Patience(5, 5)))
            await asyncio.sleep(0.05)
            assert pool.busy
            with pytest.raises(UpstreamError, match="did not accept a connection"):
                await asked
            assert not pool.busy


@story
async def test_a_late_reply_that_begins_and_pauses_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "LATE_S", 0.1)

    taken: list[asyncio.BaseTransport] = []

    class Dawdling(asyncio.Protocol):
        """Begins its reply once the client has left, and holds its half of the connection."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport
            taken.append(transport)

        def eof_received(self) -> bool:
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            return True

    server = await asyncio.get_running_loop().create_server(Dawdling, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool("a worker", url, connect_timeout_s=5, keep_idle_s=5)
    late = Collected(1000, wanted_late=True)
    asked = asyncio.create_task(pool.post(b"/", b"", b"", late, Patience(60, 60)))
    await eventually(lambda: late.sent)
    asked.cancel()
    await eventually(lambda: late.head is not None)
    await asyncio.sleep(0.15)
    pool.expire(asyncio.get_running_loop().time())
    await eventually(lambda: not pool.connections)
    taken[0].abort()
    server.close()
