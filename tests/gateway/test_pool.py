"""How a worker is addressed."""

from __future__ import annotations

import asyncio
import socket

import pytest
from stories import story

from coterie.gateway.legs.pool import Pool
from coterie.gateway.legs.upstream import Collected, Patience


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
