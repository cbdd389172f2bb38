"""Centroids that follow the pool and the traffic of a running gateway."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from stories import Cluster, cluster, eventually, story

from bare_profiles import bare_profile
from coterie.core import ExpertCounts, ModelGeometry
from coterie.gateway.fleet import background
from coterie.signature import SignatureTransform

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=1)
ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
SETTINGS = {"decode_policy": "locality_refit", "health_interval_s": 0.05}


def counts(expert: int) -> ExpertCounts:
    """7 tokens that all chose one expert."""
    rows = np.zeros((1, 4), np.uint8)
    rows[:, expert] = 7
    return ExpertCounts(GEOMETRY, rows, 7, 7)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Two centroids: of prompts that use expert 0, and of those that use expert 1."""
    file = tmp_path / "profile.safetensors"
    bare_profile(SignatureTransform(GEOMETRY, (0,), "count"), np.eye(4, dtype=np.float32)[:2], "tiny").save(file)
    return str(file)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TICK_S", 0.02)


async def send(running: Cluster, expert: int, times: int) -> None:
    running.prefill[0].counts = counts(expert)
    for _ in range(times):
        assert (await running.post(ASK)).status == 200


async def worker_of(running: Cluster, expert: int) -> str:
    await send(running, expert, 1)
    worker: str = running.gateway.dispatcher.decisions.entries()[-1]["decode"]
    return worker


@story
async def test_a_profile_of_two_centroids_is_adapted_to_three_workers_and_to_the_loss_of_one(profile: str) -> None:
    async with cluster(decode=3, profile=profile, counts=counts(0), **SETTINGS) as running:
        assert running.metric("centroids") == 2
        for expert in (0, 2, 1):
            await send(running, expert, 8)
        await eventually(lambda: running.metric("refits_installed_total") == 1)
        assert running.metric("centroids") == 3
        owners = [await worker_of(running, expert) for expert in (0, 1, 2)]
        assert sorted(owners) == ["decode-0", "decode-1", "decode-2"]
        lost = int(owners[2][-1])
        await running.decode[lost].stop()
        await eventually(lambda: running.metric("centroids") == 2)
        assert await worker_of(running, 2) != owners[2]
        await running.decode[lost].start()
        await eventually(lambda: running.metric("refits_installed_total") == 2)
        assert running.metric("centroids") == 3
        await running.idle()


@story
async def test_the_admin_side_shows_how_the_policy_stands(profile: str) -> None:
    async with (
        cluster(decode=2, profile=profile, counts=counts(0), **SETTINGS) as running,
        httpx.AsyncClient(base_url=running.admin_url) as admin,
    ):
        await send(running, 1, 3)
        prefill, decode = (await admin.get("/policies")).json()["policies"]
        assert prefill == {"role": "prefill", "name": "prefix", "figures": {}}
        assert (decode["role"], decode["name"]) == ("decode", "locality_refit")
        assert decode["figures"]["refit_window_requests"] == 3
        text = (await admin.get("/metrics")).text
        assert "# TYPE coterie_refits_installed_total counter" in text
        assert "coterie_refit_window_requests 3.0" in text
