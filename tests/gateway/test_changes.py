"""Another configuration and other workers while requests are under way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Exchange, FakeEngine, Kv, hang, serve_well
from stories import Cluster, configured, eventually, fakes, story

from bare_profiles import bare_profile
from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.vllm_nixl import VllmNixl
from coterie.errors import ConfigError, InputError, ProfileError
from coterie.gateway.admin.changes import UnknownWorkerError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.server import serving
from coterie.signature import SignatureTransform

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=1)
ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
STREAM = {**ASK, "max_tokens": 40, "stream": True}
QUICK = {"health_interval_s": 0.05}


def counts(expert: int) -> ExpertCounts:
    rows = np.zeros((1, 4), np.uint8)
    rows[:, expert] = 7
    return ExpertCounts(GEOMETRY, rows, 7, 7)


def write_profile(file: Path, *experts: int) -> str:
    """Centroid k is of prompts that use only the k-th of these experts."""
    transform = SignatureTransform(GEOMETRY, (0,), idf=np.ones((1, 4), np.float32))
    centroids = np.stack([transform.apply(counts(expert).counts) for expert in experts]).astype(np.float32)
    bare_profile(transform, centroids, "tiny").save(file)
    return str(file)


class Running(Cluster):
    """A gateway whose configuration can be changed: `config` is what a reload reads."""

    config: GatewayConfig

    def set(self, **settings: Any) -> None:
        self.config = dataclasses.replace(self.config, **settings)

    def names(self, role: str = "decode") -> list[str]:
        return [worker.name for worker in getattr(self.gateway, role).workers.values()]

    async def available(self, *names: str) -> None:
        """Wait until exactly these decode workers are."""
        await eventually(lambda: [worker.name for worker in self.gateway.decode.available()] == list(names))


@contextlib.asynccontextmanager
async def running(prefill: int = 1, decode: int = 2, spare: int = 1, **settings: Any) -> AsyncIterator[Running]:
    """A gateway in front of healthy fakes; the last `spare` of `decode` are not its workers yet."""
    kv = Kv()
    async with fakes(prefill, kv, counts(1)) as prefills, fakes(decode + spare, kv) as decodes:
        config = configured(prefills, decodes[:decode], **{**QUICK, **settings})
        async with serving(config, VllmNixl(), lambda: found.config) as served:
            found = Running(prefills, decodes, kv, served.gateway, served.url, served.admin_url, served.changes)
            found.config = config
            found.forget_probes()
            yield found
            await found.idle()
            assert not kv.held


@story
async def test_an_added_worker_is_probed_before_its_first_request_and_then_gets_its_share() -> None:
    async with running() as cluster:
        worker, new = await cluster.changes.add("decode", cluster.decode[2].url)
        assert (worker.name, new, worker.problem is None) == ("decode-2", True, False)
        assert (await cluster.post(ASK)).status == 200
        assert not cluster.decode[2].seen
        await cluster.available("decode-0", "decode-1", "decode-2")
        assert [seen.headers["x-request-id"] for seen in cluster.decode[2].seen] == ["coterie-probe"]
        for _ in range(3):
            assert (await cluster.post(ASK)).status == 200
        assert len(cluster.decode[2].seen) == 2
        assert cluster.gateway.config.decode[-1] == cluster.decode[2].url
        assert cluster.metric("worker_available", role="decode", worker="decode-2") == 1


@story
async def test_a_worker_that_is_there_already_is_not_added_again() -> None:
    async with running() as cluster:
        worker, new = await cluster.changes.add("decode", cluster.decode[1].url + "/")
        assert (worker.name, new, cluster.changes.generation) == ("decode-1", False, 1)


@story
async def test_a_removed_worker_ends_what_it_has_and_is_forgotten() -> None:
    async with running(spare=0) as cluster:
        cluster.decode[1].token_delay_s = 0.01
        async with cluster.client() as client:
            for _ in range(2):  # round robin: the second goes to decode-1
                client.send(b"")
                reply = asyncio.create_task(cluster.post(STREAM))
                await eventually(lambda: sum(len(engine.seen) for engine in cluster.decode) > 0)
                if cluster.decode[1].seen:
                    break
                await reply
                cluster.forget_probes()
            await cluster.changes.remove("decode-1")
            assert cluster.names() == ["decode-0", "decode-1"]
            assert cluster.metric("worker_available", role="decode", worker="decode-1") == 0
            for _ in range(3):
                assert (await cluster.post(ASK)).status == 200
            whole = await reply
        assert b"t39" in whole.body
        assert b"[DONE]" in whole.body
        assert len(cluster.decode[1].seen) == 1
        await eventually(lambda: cluster.names() == ["decode-0"])
        assert [state.name for state in cluster.gateway.decode.ledger.states()] == ["decode-0"]
        connections = cluster.decode[1].connections
        await asyncio.sleep(3 * QUICK["health_interval_s"])
        assert cluster.decode[1].connections == connections  # nobody looks after its health any more


@story
async def test_a_removed_workers_requests_are_cut_when_its_grace_is_over() -> None:
    async with running(decode=1, spare=1, removal_grace_s=0.05, retries=0) as cluster:
        cluster.decode[0].answer = hang
        reply = asyncio.create_task(cluster.post(ASK))
        await eventually(lambda: len(cluster.decode[0].seen) == 1)
        await cluster.changes.add("decode", cluster.decode[1].url)
        await cluster.changes.remove("decode-0")
        found = await reply
        assert found.status == 504
        assert "decode-0 was removed" in found.json["error"]["message"]
        await eventually(lambda: cluster.names() == ["decode-1"])
        await eventually(lambda: not any(worker.pool.busy for worker in cluster.gateway.workers))
        await cluster.available("decode-1")


@story
async def test_a_worker_that_comes_back_before_it_was_forgotten_is_the_same_and_probed_anew() -> None:
    async with running(spare=0) as cluster:
        before = cluster.gateway.decode.workers["decode-1"]
        cluster.decode[1].token_delay_s = 0.01
        replies = [asyncio.create_task(cluster.post(STREAM)) for _ in range(2)]
        await eventually(lambda: len(cluster.decode[1].seen) == 1)
        await cluster.changes.remove("decode-1")
        worker, new = await cluster.changes.add("decode", cluster.decode[1].url)
        assert (worker is before, new) == (True, True)
        assert worker.problem is not None
        assert [reply.status for reply in await asyncio.gather(*replies)] == [200, 200]
        await cluster.available("decode-0", "decode-1")


@story
async def test_a_name_stays_with_its_url_for_as_long_as_the_gateway_runs() -> None:
    async with running(decode=2, spare=1) as cluster:
        gone, other = cluster.decode[1].url, cluster.decode[2].url
        await cluster.changes.remove("decode-1")
        await eventually(lambda: cluster.names() == ["decode-0"])
        assert (await cluster.changes.add("decode", other))[0].name == "decode-2"
        assert (await cluster.changes.add("decode", gone))[0].name == "decode-1"
        assert cluster.names() == ["decode-0", "decode-2", "decode-1"]
        await cluster.available("decode-0", "decode-2", "decode-1")


@story
async def test_the_last_worker_of_a_role_stays_and_unknown_ones_are_named() -> None:
    async with running(decode=1) as cluster:
        with pytest.raises(ConfigError, match="decode: no worker"):
            await cluster.changes.remove("decode-0")
        for call in (lambda: cluster.changes.remove("decode-9"), lambda: cluster.changes.remove("prefill")):
            with pytest.raises(UnknownWorkerError, match="there are prefill-0, decode-0"):
                await call()
        with pytest.raises(ConfigError, match="://HOST:PORT"):
            await cluster.changes.add("decode", "ftp://x")
        assert (await cluster.post(ASK)).status == 200
        assert cluster.changes.generation == 1


@story
async def test_a_drained_worker_gets_nothing_until_it_is_used_again() -> None:
    async with running() as cluster:
        cluster.changes.drain("decode-0")
        for _ in range(3):
            assert (await cluster.post(ASK)).status == 200
        assert not cluster.decode[0].seen
        await asyncio.sleep(3 * QUICK["health_interval_s"])
        await cluster.available("decode-1")
        assert (await cluster.changes.reload()).settings == ()
        await cluster.available("decode-1")
        cluster.changes.drain("decode-0", on=False)
        await cluster.available("decode-0", "decode-1")
        for _ in range(2):
            assert (await cluster.post(ASK)).status == 200
        assert len(cluster.decode[0].seen) == 1


@story
async def test_prefill_workers_come_and_go_too() -> None:
    async with running(prefill=2) as cluster:
        await cluster.changes.remove("prefill-1")
        await eventually(lambda: cluster.names("prefill") == ["prefill-0"])
        assert (await cluster.post(ASK)).status == 200
        assert not cluster.prefill[1].seen
        await cluster.changes.add("prefill", cluster.prefill[1].url)
        await eventually(lambda: len(cluster.gateway.prefill.available()) == 2)
        assert len(cluster.prefill[1].seen) == 2  # one probe with each decode worker


# --- reload ------------------------------------------------------------------------------------------


@story
async def test_a_reload_takes_the_workers_of_the_file_and_keeps_who_stays() -> None:
    async with running(spare=1) as cluster:
        stays = cluster.gateway.decode.workers["decode-1"]
        cluster.set(decode=(cluster.decode[2].url, cluster.decode[1].url), default_output_tokens=9)
        change = await cluster.changes.reload()
        assert change.settings == ("decode", "default_output_tokens")
        assert (change.added, change.removed, change.policies) == (("decode-2",), ("decode-0",), ("decode",))
        await cluster.available("decode-2", "decode-1")
        assert cluster.gateway.decode.workers["decode-1"] is stays
        assert (await cluster.post({"model": "tiny", "prompt": "a"})).status == 200
        assert cluster.gateway.dispatcher.decisions.entries()[-1]["output_tokens"] == 9
        assert cluster.metric("config_generation") == cluster.changes.generation == 2
        assert cluster.metric("reloads_total", outcome="applied") == 1


@story
async def test_a_reload_undoes_what_was_changed_by_hand() -> None:
    async with running(spare=1) as cluster:
        await cluster.changes.add("decode", cluster.decode[2].url)
        assert (await cluster.changes.reload()).removed == ("decode-2",)
        await eventually(lambda: cluster.names() == ["decode-0", "decode-1"])


@story
async def test_a_worker_that_is_removed_amid_its_probe_leaves_no_kv_behind() -> None:
    async with running(spare=1) as cluster:
        taken = asyncio.Event()

        async def late(engine: FakeEngine, exchange: Exchange) -> None:
            await taken.wait()
            await serve_well(engine, exchange)

        cluster.decode[2].answer = late
        await cluster.changes.add("decode", cluster.decode[2].url)
        await eventually(lambda: bool(cluster.decode[2].seen))
        await cluster.changes.reload()
        await asyncio.sleep(0.05)
        assert cluster.kv.held
        taken.set()
        await eventually(lambda: not cluster.kv.held)
        await eventually(lambda: cluster.names() == ["decode-0", "decode-1"])


@story
async def test_a_worker_is_probed_to_the_end_though_another_is_removed_meanwhile() -> None:
    async with running(prefill=2, spare=1) as cluster:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def late(engine: FakeEngine, exchange: Exchange) -> None:
            begun.set()
            await go_on.wait()
            await serve_well(engine, exchange)

        cluster.prefill[0].answer = late
        await cluster.changes.add("decode", cluster.decode[2].url)
        await begun.wait()
        await cluster.changes.remove("prefill-1")
        await eventually(lambda: cluster.names("prefill") == ["prefill-0"])
        go_on.set()
        await cluster.available("decode-0", "decode-1", "decode-2")


@story
async def test_a_worker_joins_though_another_has_just_stopped_serving_its_model() -> None:
    async with running(prefill=2, spare=1) as cluster:
        cluster.prefill[1].models = []
        gets = len(cluster.prefill[1].gets)
        await eventually(lambda: len(cluster.prefill[1].gets) >= gets + 2)  # /health and /v1/models
        await cluster.changes.add("decode", cluster.decode[2].url)
        await cluster.available("decode-0", "decode-1", "decode-2")


@story
async def test_a_watch_that_fails_is_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as cluster:
        monkeypatch.setattr(cluster.gateway.prober, "check", lambda worker: 1 / 0)
        await eventually(lambda: "ZeroDivisionError" in caplog.text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 1}, "port: cannot change"),
        ({"decode_policy": "best"}, "'best'"),
        ({"decode_policy": "locality"}, "needs a profile"),
        ({"profile": "/nowhere"}, "/nowhere"),
        ({"decode_policy": "domain"}, "needs a labelled trace"),
        ({"api_keys": "/nowhere"}, "/nowhere"),
    ],
)
@story
async def test_a_bad_reload_changes_nothing_and_says_why(
    settings: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as cluster:
        policy = cluster.gateway.decode.policy
        cluster.set(**settings, tau=0.5, decode=(cluster.decode[2].url,))
        with pytest.raises(InputError, match=words):
            await cluster.changes.reload()
        assert words in caplog.text
        assert cluster.gateway.config.tau == 0.1
        assert cluster.gateway.decode.policy is policy
        assert cluster.names() == ["decode-0", "decode-1"]
        assert cluster.changes.generation == 1
        assert cluster.metric("reloads_total", outcome="refused") == 1
        assert (await cluster.post(ASK)).status == 200


@story
async def test_a_profile_that_was_replaced_is_gone_by_and_one_that_was_not_leaves_the_policy_as_it_is(
    tmp_path: Path,
) -> None:
    profile = write_profile(tmp_path / "p", 0, 1)
    async with running(decode_policy="locality", profile=profile) as cluster:
        policy = cluster.gateway.decode.policy
        assert (await cluster.changes.reload()).policies == ()
        assert cluster.gateway.decode.policy is policy
        await cluster.post(ASK)
        assert cluster.gateway.dispatcher.decisions.entries()[-1]["decode"] == "decode-1"
        write_profile(tmp_path / "p", 1, 0)
        assert (await cluster.changes.reload()).policies == ("decode",)
        await cluster.post(ASK)
        assert cluster.gateway.dispatcher.decisions.entries()[-1]["decode"] == "decode-0"


@story
async def test_a_profile_must_fit_the_workers_that_there_will_be(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p", 0, 1)
    async with running(decode_policy="locality", profile=profile) as cluster:
        with pytest.raises(ProfileError, match="2 centroids for 3"):
            await cluster.changes.add("decode", cluster.decode[2].url)
        with pytest.raises(ProfileError, match="2 centroids for 1"):
            await cluster.changes.remove("decode-1")
        write_profile(tmp_path / "p", 0, 2, 1)
        cluster.set(decode=tuple(engine.url for engine in cluster.decode))
        assert (await cluster.changes.reload()).added == ("decode-2",)
        await cluster.available("decode-0", "decode-1", "decode-2")
        await cluster.post(ASK)
        assert cluster.gateway.dispatcher.decisions.entries()[-1]["decode"] == "decode-2"
        other = SignatureTransform(ModelGeometry(1, 8, 1), (0,), idf=np.ones((1, 8), np.float32))
        bare_profile(other, np.eye(8, dtype=np.float32)[:3], "tiny").save(tmp_path / "p")
        with pytest.raises(ProfileError, match="1 layers x 8 experts"):
            await cluster.changes.reload()


@story
async def test_policies_that_adapt_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p", 0, 1)
    async with running(decode_policy="locality_refit", profile=profile) as cluster:
        for _ in range(2):
            await cluster.changes.add("decode", cluster.decode[2].url)
            await cluster.available("decode-0", "decode-1", "decode-2")
            assert (await cluster.post(ASK)).status == 200
            await cluster.changes.remove("decode-2")
            await cluster.available("decode-0", "decode-1")
            assert (await cluster.post(ASK)).status == 200
            await eventually(lambda: len(cluster.names()) == 2)
        cluster.set(decode_policy="marginal", profile=None)
        assert (await cluster.changes.reload()).policies == ("decode",)
        await cluster.post(ASK)
        assert cluster.gateway.decode.policy.name == "marginal"


@story
async def test_limits_and_times_hold_from_the_reload_on_for_open_connections_too() -> None:
    async with running() as cluster, cluster.client() as client:
        client.post(b'{"model": "tiny", "prompt": "a", "max_tokens": 1}')
        assert (await client.reply()).status == 200
        cluster.set(max_body_bytes=10, prefill_timeout_s=0.1, retries=0, connect_timeout_s=1.5, log_requests=False)
        await cluster.changes.reload()
        client.post(b'{"model": "tiny", "prompt": "a", "max_tokens": 1}')
        assert (await client.reply()).status == 413
        cluster.set(max_body_bytes=1000)
        await cluster.changes.reload()
        assert cluster.gateway.decode.workers["decode-0"].pool.connect_timeout_s == 1.5
        cluster.prefill[0].answer = hang
        assert (await cluster.post(ASK)).status == 504


@story
async def test_filters_can_be_switched_on_and_read_the_workers_from_then_on() -> None:
    async with running(reading_interval_s=0.2) as cluster:
        for engine, usage in zip(cluster.decode, (0.95, 0.2, 0), strict=True):
            engine.metrics = (
                b'vllm:kv_cache_usage_perc{} %g\nvllm:num_requests_waiting_by_reason{reason="capacity"} 0\n' % usage
            )
        cluster.set(kv_limit=0.9)
        await cluster.changes.reload()
        await eventually(lambda: all(state.reading for state in cluster.gateway.decode.ledger.states()))
        for _ in range(3):
            await cluster.post(ASK)
        assert not cluster.decode[0].seen


@story
async def test_whatever_comes_and_goes_every_request_is_answered_well() -> None:
    """Requests on their way while workers are added, drained and removed, and settings reloaded, in any order."""
    async with running(prefill=2, decode=2, spare=2, decode_policy="marginal", removal_grace_s=20) as cluster:
        for engine in cluster.decode:
            engine.token_delay_s = 0.002
        rng, stop, statuses = random.Random(5), asyncio.Event(), []

        async def ask() -> None:
            while not stop.is_set():
                reply = await cluster.post(STREAM if rng.random() < 0.5 else ASK)
                statuses.append(reply.status == 200 and b'"error"' not in reply.body)

        async def two_more() -> None:
            seen = len(statuses)
            await eventually(lambda: len(statuses) >= seen + 2)

        asking = [asyncio.create_task(ask()) for _ in range(8)]
        for step in range(40):
            with contextlib.suppress(InputError):  # the last worker stays
                await _any_change(cluster, rng, step)
            await two_more()
            if not cluster.gateway.ready:
                cluster.changes.drain(rng.choice(cluster.gateway.decode.targets).name, on=False)
        stop.set()
        await asyncio.gather(*asking)
        assert all(statuses)


async def _any_change(cluster: Running, rng: random.Random, step: int) -> None:
    """One that leaves a well worker of each role."""
    changes, decode = cluster.changes, cluster.gateway.decode
    well = decode.available()
    match rng.choice(("add", "remove", "drain", "undrain", "reload")):
        case "add":
            await changes.add("decode", rng.choice(cluster.decode).url)
        case "remove" if len(well) > 1:
            await changes.remove(rng.choice(well).name)
        case "drain" if len(well) > 1:
            changes.drain(rng.choice(well).name)
        case "undrain":
            changes.drain(rng.choice(decode.targets).name, on=False)
        case "reload":
            present = tuple(dict.fromkeys([worker.url for worker in well] or [decode.targets[0].url]))
            cluster.set(decode=present, default_output_tokens=step + 1)
            await changes.reload()
