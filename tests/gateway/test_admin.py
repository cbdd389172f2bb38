"""The admin side over HTTP: what it takes, what it refuses, and that it is what its description says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from stories import Cluster, cluster, eventually, story

from coterie.gateway.admin import api as admin_api
from coterie.gateway.admin.openapi import MAX_BODY_BYTES
from coterie.gateway.config import FIELDS

JSON = {"content-type": "application/json"}
ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}


@contextlib.asynccontextmanager
async def administered(**settings: Any) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    async with (
        cluster(health_interval_s=0.05, **settings) as running,
        httpx.AsyncClient(base_url=running.admin_url) as admin,
    ):
        yield running, admin


def problem(reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply, which has the shape of all errors."""
    assert reply.headers["content-type"] == "application/json"
    return msgspec.structs.asdict(msgspec.json.decode(reply.content, type=admin_api.Error).error)


@story
async def test_a_worker_is_added_drained_used_again_and_removed() -> None:
    async with administered() as (running, admin):
        url = running.decode[1].url
        removed = await admin.delete("/workers/decode-1")
        assert (removed.status_code, removed.json()["state"]) == (202, "leaving")
        await eventually(lambda: len(running.gateway.decode.workers) == 1)
        added = await admin.post("/workers", json={"role": "decode", "url": url})
        assert added.status_code == 201
        assert (added.json()["name"], added.json()["state"]) == ("decode-1", "unavailable")
        assert (await admin.post("/workers", json={"role": "decode", "url": url})).status_code == 200
        await eventually(lambda: len(running.gateway.decode.available()) == 2)
        drained = await admin.post("/workers/decode-1/drain")
        assert (drained.status_code, drained.json()["state"]) == (200, "drained")
        rows = (await admin.get("/workers")).json()["workers"]
        assert [(row["name"], row["state"]) for row in rows] == [
            ("prefill-0", "available"),
            ("decode-0", "available"),
            ("decode-1", "drained"),
        ]
        assert (await admin.post("/workers/decode-1/undrain")).json()["state"] == "available"
        config = (await admin.get("/config")).json()
        assert (config["generation"], config["decode"]) == (3, [running.decode[0].url, url])
        assert config["changed_s"] > 1.7e9


@story
async def test_a_reload_says_what_it_changed() -> None:
    async with administered() as (_, admin):
        reply = await admin.post("/reload")
        assert reply.json() == {"generation": 2, "settings": [], "added": [], "removed": [], "policies": []}
        metrics = (await admin.get("/metrics")).text
        assert "coterie_config_generation 2.0" in metrics
        assert 'coterie_reloads_total{outcome="applied"} 1.0' in metrics


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "words"),
    [
        ("GET", "/nothing", {}, 404, "/openapi.json"),
        ("GET", "/reload", {}, 405, "Method Not Allowed"),
        ("PUT", "/workers", {}, 405, "Method Not Allowed"),
        ("POST", "/workers", {"content": b"{}"}, 415, "application/json"),
        ("POST", "/workers", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "application/json"),
        ("POST", "/workers", {"json": {}}, 400, "role"),
        ("POST", "/workers", {"json": {"role": "x", "url": "http://a:1"}}, 400, "x"),
        ("POST", "/workers", {"json": {"role": "decode", "url": 7}}, 400, "url"),
        ("POST", "/workers", {"json": {"role": "decode", "url": "a"}}, 400, "://HOST:PORT"),
        ("POST", "/workers", {"json": {"role": "decode", "url": "http://a:1", "x": 1}}, 400, "x"),
        ("POST", "/workers", {"content": b"{", "headers": JSON}, 400, "the body"),
        ("POST", "/workers", {"content": b"\xff", "headers": JSON}, 400, "the body"),
        (
            "POST",
            "/workers",
            {"content": b"[" * MAX_BODY_BYTES, "headers": JSON},
            400,
            "",
        ),
        ("POST", "/workers", {"content": b"x" * (MAX_BODY_BYTES + 1)}, 413, "larger than 65536"),
        ("POST", "/reload", {"json": {}}, 400, "takes no body"),
        ("POST", "/reload", {"headers": {"origin": "http://evil.example"}}, 403, "evil.example"),
        ("DELETE", "/workers/decode-7", {}, 404, "there are prefill-0, decode-0, decode-1"),
        ("POST", "/workers/%2e%2e/drain", {}, 404, ""),
        ("DELETE", "/workers/prefill-0", {}, 409, "prefill: no worker"),
    ],
)
@story
async def test_what_is_wrong_is_refused_and_changes_nothing(
    method: str, path: str, sent: dict[str, Any], status: int, words: str
) -> None:
    async with administered() as (running, admin):
        reply = await admin.request(method, path, **sent)
        assert reply.status_code == status
        assert words in problem(reply)["message"]
        assert [worker.name for worker in running.gateway.workers] == ["prefill-0", "decode-0", "decode-1"]
        assert running.changes.generation == 1


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("localhost", True),
        ("LOCALHOST:8001", True),
        ("127.0.0.1:8001", True),
        ("[::1]:8001", True),
        ("evil.example", False),
        ("evil.example:8001", False),
        ("127.0.0.1.evil.example", False),
        ("[evil.example]", False),
        ("", False),
    ],
)
@story
async def test_without_a_key_a_page_whose_name_stands_for_this_machine_is_refused(host: str, taken: bool) -> None:
    async with administered() as (running, admin):
        headers = {"host": host, "origin": f"http://{host}"}
        reply = await admin.post("/workers/decode-0/drain", headers=headers)
        assert reply.status_code == (200 if taken else 403)
        assert bool(running.gateway.decode.workers["decode-0"].problems) is taken
        assert (await admin.get("/workers", headers=headers)).status_code == reply.status_code
        assert (await admin.get("/health", headers=headers)).status_code == 200


@story
async def test_all_methods_of_a_path_are_told_and_pages_of_its_own_may_ask() -> None:
    async with administered() as (running, admin):
        assert set((await admin.put("/workers")).headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
        own = {"origin": running.admin_url}
        assert (await admin.post("/reload", headers=own)).status_code == 200
        assert (await admin.head("/workers")).content == b""


@story
async def test_the_description_names_every_path_setting_and_reply() -> None:
    async with administered() as (_, admin):
        described = (await admin.get("/openapi.json")).json()
        assert described["openapi"] == "3.1.0"
        for path, operations in described["paths"].items():
            for method in operations:
                reply = await admin.request(method, path.replace("{name}", "decode-1"))
                assert str(reply.status_code) in operations[method]["responses"], (method, path, reply.text)
        settings = described["components"]["schemas"]["GatewayConfig"]["properties"]
        assert settings.keys() == FIELDS.keys()
        assert all(settings[name]["description"] == field.metadata["help"] for name, field in FIELDS.items())
        beside = {"generation", "changed_s", "urls", "drained"}
        assert (await admin.get("/config")).json().keys() == settings.keys() | beside


@story
async def test_a_fault_inside_is_told_as_one_without_its_particulars(monkeypatch: pytest.MonkeyPatch) -> None:
    async with administered() as (running, admin):
        monkeypatch.setattr(running.changes, "drain", lambda name: 1 / 0)
        reply = await admin.post("/workers/decode-0/drain")
        assert reply.status_code == 500
        assert "division" not in problem(reply)["message"]
