"""Requests that a worker fails are served by another, and a worker that fails is left alone."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_engine import Answer, Exchange, FakeEngine, die_after, garbage, hang, refuse, reset, serve_well
from stories import Cluster, cluster, eventually, story

from coterie.gateway.fleet.workers import Worker

ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
STREAM = {**ASK, "stream": True}
ANSWER = "t0 t1 t2 "


async def answered_well(running: Cluster) -> None:
    reply = await running.post(ASK)
    assert reply.status == 200
    assert reply.json["choices"][0]["text"] == ANSWER
    await running.idle()
    assert not running.kv.held


@pytest.mark.parametrize("fault", [reset, garbage, refuse(502, b"{}"), refuse(503, b"{}"), refuse(504, b"{}")])
@story
async def test_what_a_prefill_worker_fails_another_computes(fault: Answer) -> None:
    async with cluster(prefill=2, prefill_policy="round_robin") as running:
        running.prefill[0].answer = fault
        await answered_well(running)
        assert len(running.prefill[1].seen) == 1


@story
async def test_a_prefill_reply_that_is_nonsense_is_computed_by_another() -> None:
    async with cluster(prefill=2, prefill_policy="round_robin") as running:
        running.prefill[0].answer = refuse(200, b"nonsense")
        await answered_well(running)
        assert running.metric("retries_total", role="prefill", reason="nonsense") == 1


@pytest.mark.parametrize("status", [400, 404, 500, 501])
@story
async def test_an_answer_that_may_be_the_request_s_own_fault_is_passed_on(status: int) -> None:
    async with cluster(prefill=2, prefill_policy="round_robin") as running:
        running.prefill[0].answer = refuse(status, b"{}")
        assert (await running.post(ASK)).status == status
        assert not running.prefill[1].seen


@story
async def test_a_decode_worker_that_refuses_the_connection_is_replaced_while_the_kv_waits() -> None:
    async with cluster(health_interval_s=60) as running:
        await running.decode[0].stop()
        await answered_well(running)
        assert len(running.prefill[0].seen) == 1
        assert running.metric("retries_total", role="decode", reason="connect") == 1


@pytest.mark.parametrize(("status", "prefills"), [(502, 2), (503, 1), (504, 2)])
@story
async def test_a_decode_worker_that_declines_is_replaced_while_the_kv_waits(status: int, prefills: int) -> None:
    async with cluster() as running:
        running.decode[0].answer = refuse(status, b"{}")
        await answered_well(running)
        assert len(running.prefill[0].seen) == prefills  # one who speaks for a worker cannot know what that had begun


@pytest.mark.parametrize("fault", [reset, garbage, die_after(0)])
@story
async def test_a_decode_worker_lost_before_its_first_byte_costs_another_prefill(fault: Answer) -> None:
    async with cluster() as running:
        running.decode[0].answer = fault
        reply = await running.post(STREAM)
        assert reply.status == 200
        assert reply.body.count(b"data: ") == 4  # three tokens and [DONE], none doubled
        await running.idle()
        assert not running.kv.held
        assert len(running.prefill[0].seen) == 2


@story
async def test_a_decode_worker_that_hangs_is_replaced() -> None:
    async with cluster(first_byte_timeout_s=0.1) as running:
        running.decode[0].answer = hang
        await answered_well(running)
        assert running.metric("retries_total", role="decode", reason="timeout") == 1


@story
async def test_where_all_decline_the_last_answer_is_passed_on() -> None:
    async with cluster() as running:
        for i, engine in enumerate(running.decode):
            engine.answer = refuse(503, b'{"who": %d}' % i)
        reply = await running.post(ASK)
        assert (reply.status, reply.json) == (503, {"who": 1})
        await running.idle()


@story
async def test_a_request_is_retried_only_as_often_as_allowed() -> None:
    async with cluster(prefill=4, prefill_policy="round_robin", retries=1) as running:
        for engine in running.prefill:
            engine.answer = reset
        assert (await running.post(ASK)).status == 502
        assert [bool(engine.seen) for engine in running.prefill] == [True, True, False, False]
        await running.idle()


@story
async def test_a_reply_that_has_begun_is_not_begun_again() -> None:
    async with cluster() as running:
        running.decode[0].answer = die_after(2)
        reply = await running.post(STREAM)
        assert b"worker_lost" in reply.body
        assert not running.decode[1].seen
        assert running.metric("retries_total", role="decode", reason="closed") == 0


@story
async def test_kv_that_waited_too_long_is_released_and_computed_again() -> None:
    async def slowly_decline(engine: FakeEngine, exchange: Exchange) -> None:
        await asyncio.sleep(0.15)
        exchange.full(503, b"{}")

    async with cluster(max_handoff_s=0.1) as running:
        running.decode[0].answer = slowly_decline
        await answered_well(running)
        assert len(running.prefill[0].seen) == 2
        assert running.metric("retries_total", role="decode", reason="too old") == 1


@story
async def test_a_dead_worker_is_asked_once_and_again_when_it_is_back() -> None:
    async with cluster(decode_policy="least_load", health_interval_s=60, breaker_open_s=0.1) as running:
        await running.decode[0].stop()
        replies = [await running.post(ASK) for _ in range(10)]
        assert [reply.status for reply in replies] == [200] * 10
        assert running.metric("transport_errors_total", worker="decode-0", kind="connect") == 1
        assert running.metric("breaker_openings_total", worker="decode-0") == 1
        await running.decode[0].start()
        await eventually(lambda: len(running.gateway.decode.available()) == 2)
        running.forget_probes()
        await asyncio.gather(*(running.post(ASK) for _ in range(4)))
        assert running.decode[0].seen
        await running.idle()


@story
async def test_a_fault_of_the_gateways_own_in_a_trial_or_a_check_ends_no_watch(monkeypatch, caplog) -> None:
    async with cluster(decode_policy="least_load", health_interval_s=0.05, breaker_open_s=0.05) as running:
        good, fails = running.gateway.prober.check, ["trial", "check"]

        async def check(worker: Worker) -> None:
            if worker.name == "decode-0" and fails and (worker.breaker.state != "closed") == (fails[0] == "trial"):
                raise KeyError(fails.pop(0))
            await good(worker)

        monkeypatch.setattr(running.gateway.prober, "check", check)
        await running.decode[0].stop()
        while len(running.gateway.decode.available()) == 2:
            assert (await running.post(ASK)).status == 200
        await running.decode[0].start()
        await eventually(lambda: not fails and len(running.gateway.decode.available()) == 2)
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("trial",), ("check",)]


@story
async def test_three_answers_of_500_in_a_row_open_the_breaker_and_4xx_never_do() -> None:
    async with cluster(decode=1, health_interval_s=60) as running:
        (worker,) = running.gateway.decode.workers.values()
        running.decode[0].answer = refuse(400, b"{}")
        for _ in range(5):
            assert (await running.post(ASK)).status == 400
        await running.idle()
        assert worker.breaker.state == "closed"
        running.decode[0].answer = refuse(500, b"{}")
        while worker.breaker.state == "closed":
            assert (await running.post(ASK)).status == 500
        reply = await running.post(ASK)
        assert reply.status == 503
        assert "decode-0: breaker open" in reply.json["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1


@story
async def test_with_every_prefill_worker_out_nothing_is_sent_to_decode() -> None:
    async with cluster(prefill=2, health_interval_s=60, breaker_open_s=60, breaker_most_open_s=60) as running:
        for engine in running.prefill:
            await engine.stop()
        first, second = await running.post(ASK), await running.post(ASK)
        assert (first.status, second.status) == (502, 503)
        assert "prefill-0: breaker open, prefill-1: breaker open" in second.json["error"]["message"]
        assert 50 < int(second.headers["retry-after"]) <= 60
        assert not any(engine.seen for engine in running.decode)


@story
async def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has() -> None:
    async with cluster() as running:
        fleet = running.gateway.decode
        worker = fleet.workers["decode-0"]
        running.decode[0].token_delay_s = 0.02
        async with running.client() as client:
            client.post(b'{"model": "tiny", "prompt": "x", "max_tokens": 8, "stream": true}')
            await eventually(lambda: bool(running.decode[0].seen))
            fleet.drain(worker)
            assert not fleet.holds_nothing(worker)
            assert (await running.post(ASK)).status == 200
            assert (await client.reply()).body.endswith(b"data: [DONE]\n\n")
        await running.idle()
        assert fleet.holds_nothing(worker)
        assert len(running.decode[0].seen) == 1
        fleet.resume(worker)
        assert len(fleet.available()) == 2


@story
async def test_a_worker_is_used_only_when_no_reason_against_it_is_left() -> None:
    async with cluster() as running:
        fleet = running.gateway.decode
        worker = fleet.workers["decode-0"]
        fleet.drain(worker)
        fleet.set_problem(worker, "unhealthy", "it coughs")
        fleet.resume(worker)
        assert worker.problem == "it coughs"
        assert worker not in fleet.available()
        fleet.set_problem(worker, "unhealthy", None)
        assert worker in fleet.available()


@story
async def test_the_log_tells_who_failed_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coterie.requests")
    async with cluster() as running:
        running.decode[0].answer = reset
        await answered_well(running)
        running.decode[0].answer = serve_well
    assert '"retries":["decode-0: closed"]' in caplog.text


@story
async def test_the_admin_side_and_the_metrics_show_an_open_breaker() -> None:
    async with cluster(health_interval_s=60, breaker_open_s=60, breaker_most_open_s=60) as running:
        where = {"role": "decode", "worker": "decode-0"}
        assert running.metric("breaker_open", **where) == 0
        await running.decode[0].stop()
        assert (await running.post(ASK)).status == 200
        assert running.metric("breaker_open", **where) == 1
        assert running.metric("worker_available", **where) == 0
        async with httpx.AsyncClient(base_url=running.admin_url) as admin:
            rows = {row["name"]: row for row in (await admin.get("/workers")).json()["workers"]}
        assert rows["decode-0"]["breaker"] == "open"
        assert "refused the connection" in rows["decode-0"]["problem"]
        assert rows["decode-1"]["breaker"] == "closed"
