"""Who is there at start, what must fit, and who joins and leaves later."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine, Kv, hang, refuse, serve_well
from stories import Cluster, cluster, configured, eventually, fakes, story

from bare_profiles import bare_profile
from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.vllm_nixl import VllmNixl
from coterie.errors import CoterieError, EngineError, ProfileError
from coterie.gateway.server import serving
from coterie.signature import SignatureTransform

GEOMETRY = ModelGeometry(layers=2, experts=4, top_k=1)
ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}


def counts(expert: int, geometry: ModelGeometry = GEOMETRY) -> ExpertCounts:
    """7 tokens that all chose one expert."""
    rows = np.zeros((geometry.layers, geometry.experts), np.uint8)
    rows[:, expert] = 7
    return ExpertCounts(geometry, rows, 7, 7)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Two centroids: of prompts that use expert 0, and of those that use expert 1."""
    transform = SignatureTransform(GEOMETRY, (0, 1), idf=np.ones((2, 4), np.float32))
    centroids = np.stack([transform.apply(counts(expert).counts) for expert in (0, 1)]).astype(np.float32)
    file = tmp_path / "profile.safetensors"
    bare_profile(transform, centroids, "tiny").save(file)
    return str(file)


@contextlib.asynccontextmanager
async def started(prefill: list[FakeEngine], decode: list[FakeEngine], **settings: Any) -> AsyncIterator[Cluster]:
    async with serving(configured(prefill, decode, **settings), VllmNixl()) as served:
        yield Cluster(prefill, decode, prefill[0].kv, served.gateway, served.url, served.admin_url, served.changes)


async def refusal(prefill: list[FakeEngine], decode: list[FakeEngine], **settings: Any) -> CoterieError:
    with pytest.raises(CoterieError) as caught:
        async with started(prefill, decode, **settings):
            pass
    return caught.value


@story
async def test_the_start_connects_every_pair_and_strands_nothing() -> None:
    kv = Kv()
    async with fakes(2, kv) as prefill, fakes(3, kv) as decode, started(prefill, decode) as running:
        assert [len(engine.seen) for engine in prefill] == [3, 3]
        assert [len(engine.seen) for engine in decode] == [2, 2, 2]
        assert kv.kept == 6
        assert not kv.held
        assert running.gateway.ready


@story
async def test_no_worker_of_a_role_ends_the_start_with_each_one_named() -> None:
    kv = Kv()
    async with fakes(1, kv) as prefill, fakes(2, kv) as decode:
        decode[0].health = 500
        await decode[1].stop()
        error = await refusal(prefill, decode, startup_timeout_s=0.1)
        assert isinstance(error, EngineError)
        for part in (
            "no decode worker",
            "decode-0",
            decode[0].url,
            "500",
            "decode-1",
            decode[1].url,
            "refused",
            "--startup-timeout-s",
        ):
            assert part in str(error)
        await decode[1].start()


@story
async def test_a_worker_that_is_down_at_start_joins_when_it_is_well() -> None:
    kv = Kv()
    async with fakes(1, kv) as prefill, fakes(2, kv) as decode:
        decode[1].health = 503
        async with started(prefill, decode, health_interval_s=0.05) as running:
            workers = httpx.AsyncClient(base_url=running.admin_url)
            rows = {row["name"]: row for row in (await workers.get("/workers")).json()["workers"]}
            assert rows["decode-0"]["available"]
            assert not rows["decode-1"]["available"]
            assert "503" in rows["decode-1"]["problem"]
            assert running.metric("worker_available", role="decode", worker="decode-1") == 0
            for _ in range(2):
                assert (await running.post(ASK)).status == 200
            assert not decode[1].seen
            decode[1].health = 200
            await eventually(lambda: len(running.gateway.decode.available()) == 2)
            assert len(decode[1].seen) == 1  # connected with the prefill worker before its first client
            await running.idle()
            assert not kv.held
            await workers.aclose()


@story
async def test_a_worker_that_dies_is_taken_out_and_comes_back_on_the_same_port() -> None:
    async with cluster(health_interval_s=0.05) as running:
        await running.decode[0].stop()
        await eventually(lambda: len(running.gateway.decode.available()) == 1)
        for _ in range(3):
            assert (await running.post(ASK)).status == 200
        await running.decode[0].start()
        await eventually(lambda: len(running.gateway.decode.available()) == 2)
        await running.idle()


@story
async def test_all_workers_lost_is_503_until_one_is_back() -> None:
    async with cluster(decode=1, health_interval_s=0.05) as running:
        await running.prefill[0].stop()
        await running.decode[0].stop()
        await eventually(lambda: not running.gateway.prefill.available() and not running.gateway.decode.available())
        assert (await running.post(ASK)).status == 503
        assert (await running.get("/health")).status == 503
        await running.decode[0].start()
        await running.prefill[0].start()
        await eventually(lambda: running.gateway.ready)
        assert (await running.post(ASK)).status == 200


@story
async def test_a_prefill_server_without_a_connector_ends_the_start() -> None:
    kv = Kv()
    async with fakes(1, kv) as prefill, fakes(1, kv) as decode:
        prefill[0].answer = refuse(200, b'{"kv_transfer_params": null}')
        error = await refusal(prefill, decode)
        assert prefill[0].url in str(error)
        assert "--kv-transfer-config" in str(error)


@story
async def test_a_prefill_server_that_hangs_is_left_out() -> None:
    kv = Kv()
    async with fakes(2, kv) as prefill, fakes(1, kv) as decode:
        prefill[0].answer = hang
        async with started(prefill, decode, prefill_timeout_s=0.1) as running:
            assert [worker.name for worker in running.gateway.prefill.available()] == ["prefill-1"]


@story
async def test_requests_go_where_their_experts_are(profile: str) -> None:
    async with cluster(decode_policy=None, profile=profile, counts=counts(1)) as running:
        for _ in range(3):
            assert (await running.post(ASK)).status == 200
        assert [len(engine.seen) for engine in running.decode] == [0, 3]
        running.prefill[0].counts = counts(0)
        assert (await running.post(ASK)).status == 200
        assert [len(engine.seen) for engine in running.decode] == [1, 3]
        async with httpx.AsyncClient(base_url=running.admin_url) as admin:
            decision = (await admin.get("/decisions")).json()["decisions"][-1]
        assert decision["decode"] == "decode-0"
        assert decision["scores"] == pytest.approx({"decode-0": 1.0, "decode-1": 0.0})
        assert decision["candidates"] == ["decode-0"]
        assert decision["reason"] == "locality band"
        assert (decision["prompt_tokens"], decision["output_tokens"]) == (7, 3)


@pytest.mark.parametrize(
    ("envelope", "problem"),
    [
        (
            {
                "v": 1,
                "dtype": "|u1",
                "layers": 9,
                "experts": 4,
                "top_k": 1,
                "tokens": 7,
                "covered": 7,
                "counts": "AAAA",
            },
            "36 bytes",
        ),
        ({"v": 99}, "version"),
        ("nonsense", "object"),
    ],
)
@story
async def test_a_lying_envelope_costs_the_counts_and_not_the_request(
    profile: str, envelope: object, problem: str
) -> None:
    async with cluster(profile=profile, decode_policy="locality", counts=counts(1)) as running:
        running.prefill[0].envelope = envelope
        assert (await running.post(ASK)).status == 200
        decision = running.gateway.dispatcher.decisions.entries()[-1]
        assert problem in decision["detail"]
        assert decision["reason"].startswith("load only")
        assert running.metric("counts_problems_total", kind="malformed") == 1
        await running.idle()


@story
async def test_counts_of_a_prompt_that_is_not_split_are_said_to_be_missing_for_that_reason(profile: str) -> None:
    async with cluster(profile=profile, decode_policy="locality", counts=counts(1)) as running:
        assert (await running.post({**ASK, "n": 2})).status == 200
        assert running.gateway.dispatcher.decisions.entries()[-1]["detail"] == "not split: n > 1"


@pytest.mark.parametrize(
    ("decodes", "models", "shown", "words"),
    [
        (3, ["tiny"], counts(1), "2 centroids for 3"),
        (2, ["other"], counts(1), "model 'tiny'"),
        (2, ["tiny"], counts(1, ModelGeometry(2, 8, 1)), "2 layers x 8 experts"),
        (2, ["tiny"], None, "CountsConnector"),
    ],
)
@story
async def test_a_profile_that_does_not_fit_ends_the_start_or_is_left_aside(
    profile: str, decodes: int, models: list[str], shown: ExpertCounts | None, words: str
) -> None:
    kv = Kv()
    async with fakes(1, kv, shown) as prefill, fakes(decodes, kv) as decode:
        for engine in [*prefill, *decode]:
            engine.models = models
        error = await refusal(prefill, decode, decode_policy="locality", profile=profile)
        assert isinstance(error, ProfileError)
        assert words in str(error)
        assert "--on-mismatch load" in str(error)
        async with started(prefill, decode, decode_policy="locality", profile=profile, on_mismatch="load") as running:
            prefill[0].answer = serve_well
            assert (await running.post(ASK)).status == 200
            assert "profile mismatch" in running.gateway.dispatcher.decisions.entries()[-1]["reason"]


@story
async def test_the_default_policy_needs_no_setting_and_without_counts_routes_by_load_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(decode_policy=None) as running:
        assert (await running.post(ASK)).status == 200
        assert running.gateway.decode.policy is not None
        assert running.gateway.decode.policy.name == "marginal"
        assert running.gateway.dispatcher.decisions.entries()[-1]["reason"] == "load only: no counts"
    assert "prefill-0: its replies carry no counts; its requests are routed by load only" in caplog.text
    caplog.clear()
    async with cluster(decode_policy=None, counts=counts(1)) as running:
        assert (await running.post(ASK)).status == 200
        assert (await running.post(ASK)).status == 200
        assert running.gateway.dispatcher.decisions.entries()[-1]["reason"] == "marginal cost"
    assert "carry no counts" not in caplog.text


@story
async def test_the_admin_side_shows_health_metrics_and_configuration() -> None:
    async with cluster() as running, httpx.AsyncClient(base_url=running.admin_url) as admin:
        await running.post(ASK)
        assert (await admin.get("/health")).status_code == 200
        assert (await admin.get("/config")).json()["decode_policy"] == "round_robin"
        text = (await admin.get("/metrics")).text
        assert 'coterie_requests_total{path="/v1/completions",status="200"} 1.0' in text
        assert 'coterie_in_flight_requests{role="decode",worker="decode-0"} 0.0' in text
        assert "coterie_ttft_seconds_count 1.0" in text
        await running.decode[0].stop()
        for worker in running.gateway.decode.workers.values():
            running.gateway.decode.set_problem(worker, "unhealthy", "x")
        assert (await admin.get("/health")).status_code == 503
