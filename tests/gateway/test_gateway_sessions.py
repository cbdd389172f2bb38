"""The turns of a conversation are decoded by one worker."""

from __future__ import annotations

from stories import cluster, story

ASK = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}


def decided(running) -> list[tuple[str, str]]:
    return [(entry["decode"], entry["reason"]) for entry in running.gateway.dispatcher.decisions.entries()]


@story
async def test_requests_of_one_session_go_to_one_decode_worker_and_its_name_stays_here() -> None:
    async with cluster(decode=3) as running:
        for session in ("a", "b", "a", "a", "b"):
            assert (await running.post(ASK, headers=f"X-Coterie-Session: {session}\r\n")).status == 200
        assert decided(running) == [
            ("decode-0", "round robin"),
            ("decode-1", "round robin"),
            ("decode-0", "session"),
            ("decode-0", "session"),
            ("decode-1", "session"),
        ]
        assert running.metric("decisions_total", role="decode", worker="decode-0", reason="session") == 2
        assert not any("x-coterie-session" in seen.headers for engine in running.engines for seen in engine.seen)


@story
async def test_no_session_is_remembered_where_none_is_to_be() -> None:
    async with cluster(keep_sessions=0) as running:
        for _ in range(3):
            await running.post(ASK, headers="X-Coterie-Session: a\r\n")
        assert [worker for worker, _ in decided(running)] == ["decode-0", "decode-1", "decode-0"]


@story
async def test_a_session_that_is_no_label_is_refused() -> None:
    async with cluster() as running:
        reply = await running.post(ASK, headers=f"X-Coterie-Session: {'x' * 129}\r\n")
        assert reply.status == 400
        assert reply.json["error"]["param"] == "X-Coterie-Session"
