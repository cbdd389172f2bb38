"""TLS with clients, with workers and on the admin side; the admin side's key."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import httpx
import pytest
from certificates import Certificate, made
from fake_engine import Exchange, FakeEngine, event, hang
from stories import cluster, eventually, post, story

from coterie.errors import ConfigError, EngineError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import read_access
from coterie.gateway.edge.tls import is_loopback, server_context, worker_context
from coterie.gateway.legs.pool import Pool
from coterie.gateway.legs.upstream import Collected, Patience, UpstreamError

ASK = b'{"model":"tiny","prompt":"a b c","max_tokens":3}'
STREAM = b'{"model":"tiny","prompt":"a b c","max_tokens":3,"stream":true}'
URLS = {"prefill": ("http://a:1",), "decode": ("http://b:1",)}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return made(tmp_path_factory.mktemp("tls"))


# --- clients -----------------------------------------------------------------------------------------


@story
async def test_clients_are_served_with_tls(certificate: Certificate) -> None:
    async with cluster(tls_cert=certificate.cert, tls_key=certificate.key) as running:
        assert running.url.startswith("https://")
        async with running.client(certificate.trusting) as client:
            for body in (ASK, STREAM, ASK.replace(b"a b c", b"a b c " * 100_000)):
                client.post(body)
                reply = await client.reply()
                assert reply.status == 200
                assert b"t0 " in reply.body
        await running.idle()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@story
async def test_tls_1_2_and_1_3_are_spoken(certificate: Certificate, version: ssl.TLSVersion) -> None:
    trusting = certificate.trusting
    trusting.minimum_version = trusting.maximum_version = version
    settings = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    async with cluster(**settings) as running, running.client(trusting) as client:
        client.post(ASK)
        assert (await client.reply()).status == 200
        assert client.writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")


@story
async def test_a_client_without_tls_gets_nothing_and_the_next_one_is_served(certificate: Certificate) -> None:
    async with cluster(tls_cert=certificate.cert, tls_key=certificate.key) as running:
        async with running.client() as client:
            client.send(post(ASK))
            with contextlib.suppress(ConnectionError):
                assert b"HTTP/1.1" not in await client.reader.read()
        async with running.client(certificate.trusting) as client:
            client.post(ASK)
            assert (await client.reply()).status == 200


@story
async def test_a_refusal_arrives_with_tls_too(certificate: Certificate) -> None:
    async with cluster(tls_cert=certificate.cert, tls_key=certificate.key, max_body_bytes=1000) as running:
        async with running.client(certificate.trusting) as client:
            client.post(b" " * 2000)
            assert (await client.reply()).status == 413
        await eventually(lambda: not running.gateway.clients)


@story
async def test_a_client_that_leaves_with_tls_cancels_its_request(certificate: Certificate) -> None:
    async with cluster(tls_cert=certificate.cert, tls_key=certificate.key) as running:
        running.prefill[0].answer = hang
        async with running.client(certificate.trusting) as client:
            client.post(ASK)
            await eventually(lambda: bool(running.prefill[0].seen))
        await eventually(lambda: running.prefill[0].aborted == 1)
        await running.idle()


def test_what_is_wrong_with_a_certificate_is_named(certificate: Certificate, tmp_path: Path) -> None:
    other = made(tmp_path)
    locked = tmp_path / "locked"
    locked.mkdir()
    with_password = made(locked, "-passout", "pass:secret")
    for cert, key, words in [
        ("none.pem", None, "No such file"),
        (certificate.cert, None, "tls: "),
        (certificate.cert, other.key, "mismatch"),
        (with_password.cert, with_password.key, "encrypted"),
    ]:
        with pytest.raises(ConfigError, match=words):
            server_context(cert, key)
    with pytest.raises(ConfigError, match=r"worker_ca: none\.pem"):
        worker_context("none.pem")


@story
async def test_a_renewed_certificate_is_shown_to_who_connects_then_and_a_bad_one_is_not(tmp_path: Path) -> None:
    old = made(tmp_path)
    old_trusting = old.trusting
    async with cluster(tls_cert=old.cert, tls_key=old.key) as running, running.client(old_trusting) as client:
        new = made(tmp_path)
        running.gateway.entrance.access = read_access(running.gateway.config, {})
        async with running.client(new.trusting) as another:
            another.post(ASK)
            assert (await another.reply()).status == 200
        client.post(ASK)  # the connection that was there goes on
        assert (await client.reply()).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            async with running.client(old_trusting):
                pass
        trusting = new.trusting
        new.spoil()
        with pytest.raises(ConfigError):
            read_access(running.gateway.config, {})
        async with running.client(trusting) as another:
            another.post(ASK)
            assert (await another.reply()).status == 200


# --- workers -----------------------------------------------------------------------------------------


@story
async def test_https_workers_are_known_by_those_who_vouch_for_them(certificate: Certificate) -> None:
    context = server_context(certificate.cert, certificate.key)
    async with cluster(decode=1, tls=context, worker_ca=certificate.cert) as running:
        before = [engine.connections for engine in running.engines]
        for body in (ASK, STREAM):
            assert (await running.post(body)).status == 200
        assert [engine.connections for engine in running.engines] == before
        await running.idle()


@story
async def test_a_worker_that_nobody_vouches_for_is_not_talked_to(certificate: Certificate) -> None:
    context = server_context(certificate.cert, certificate.key)
    with pytest.raises(EngineError, match=r"cannot be trusted: self-signed certificate; see --worker-ca"):
        async with cluster(tls=context, startup_timeout_s=0.1):
            pass


@story
async def test_a_worker_without_tls_where_some_is_expected_is_told_of(certificate: Certificate) -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool("decode worker decode-0", url, connect_timeout_s=5, keep_idle_s=5)
    with pytest.raises(UpstreamError, match=r"decode-0 cannot be trusted: TLS failed .* does it serve https"):
        await pool.get(b"/health", b"", Collected(1000), Patience(5, 5))
    server.close()


@story
async def test_a_prefill_reply_on_its_way_over_tls_is_still_read_when_the_client_leaves(
    certificate: Certificate,
) -> None:
    async def slowly(engine: FakeEngine, exchange: Exchange) -> None:
        await asyncio.sleep(0.2)
        exchange.full(200, engine.prefill_reply())

    context = server_context(certificate.cert, certificate.key)
    async with cluster(decode=1, tls=context, worker_ca=certificate.cert) as running:
        running.prefill[0].answer = slowly
        async with running.client() as client:
            client.post(ASK)
            await eventually(lambda: bool(running.prefill[0].seen))
            client.leave()
        await eventually(lambda: running.kv.kept > 0)
        await eventually(lambda: not running.kv.held)
        await running.idle()


@story
async def test_a_stream_from_a_worker_over_tls_that_is_cut_is_told_of(certificate: Certificate) -> None:
    async def cut(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        exchange.chunk(event("t0 "))
        await exchange.writer.drain()
        await asyncio.sleep(0.05)
        exchange.reset()

    context = server_context(certificate.cert, certificate.key)
    async with cluster(decode=1, tls=context, worker_ca=certificate.cert) as running:
        running.decode[0].answer = cut
        assert b"worker_lost" in (await running.post(STREAM)).body


# --- the admin side ----------------------------------------------------------------------------------


@story
async def test_the_admin_side_wants_its_key_but_for_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", "a-key-of-the-admin")
    async with cluster(admin_key_env="ADMIN") as running, httpx.AsyncClient(base_url=running.admin_url) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/metrics", "/workers", "/decisions", "/policies", "/config", "/nowhere"):
            reply = await client.get(path)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), path
        wrong = await client.get("/workers", headers={"authorization": "Bearer a-key-of-another"})
        assert wrong.status_code == 401
        right = await client.get("/config", headers={"authorization": "Bearer a-key-of-the-admin"})
        assert right.status_code == 200
        assert "a-key-of-the-admin" not in right.text


@story
async def test_the_admin_side_can_have_tls(certificate: Certificate) -> None:
    async with (
        cluster(tls_cert=certificate.cert, tls_key=certificate.key, admin_tls=True) as running,
        httpx.AsyncClient(base_url=running.admin_url, verify=certificate.trusting) as client,
    ):
        assert running.admin_url.startswith("https://")
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("host", "only_here"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_others_can_reach_needs_a_key(host: str, only_here: bool) -> None:
    assert is_loopback(host) == only_here
    GatewayConfig(**URLS, admin_host=host, admin_key_env="ADMIN")
    if only_here:
        GatewayConfig(**URLS, admin_host=host)
    else:
        with pytest.raises(ConfigError, match=r"^admin_host: .*--admin-key-env"):
            GatewayConfig(**URLS, admin_host=host)


def test_a_key_or_an_admin_side_with_tls_needs_a_certificate() -> None:
    for settings in ({"tls_key": "k.pem"}, {"admin_tls": True}):
        with pytest.raises(ConfigError, match=r"^tls_cert"):
            GatewayConfig(**URLS, **settings)
