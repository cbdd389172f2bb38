"""What a watching policy is told of replies."""

from __future__ import annotations

import json

import pytest
from fake_engine import reset
from stories import cluster, eventually, story

from coterie.clock import ManualClock
from coterie.core import Served
from coterie.gateway.legs.stream import Pace
from coterie.routing import LeastLoad

STREAM = b"data: {}\n\ndata: {}\n\ndata: {}\n\ndata: [DONE]\n\n"


class Watching(LeastLoad):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Served | None] = []

    def leased(self, lease, now_s) -> None:
        pass

    def released(self, lease, served, now_s) -> None:
        self.ends.append(served)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_events_are_counted_however_the_bytes_are_cut(size: int) -> None:
    clock = ManualClock()
    pace = Pace(clock)
    for i in range(0, len(STREAM), size):
        pace.add(STREAM[i : i + size])
    clock.advance(2.0)
    assert pace.served() == Served(3, 2.0)


def test_a_reply_without_events_tells_nothing() -> None:
    pace = Pace(ManualClock())
    assert pace.served() is None
    pace.add(b'{"choices": []}')
    assert pace.served() is None


@story
@pytest.mark.parametrize(("stream", "tokens"), [(True, 3), (False, None)])
async def test_a_policy_that_watches_is_told_of_streams_alone(stream: bool, tokens: int | None) -> None:
    async with cluster() as running:
        policy = running.gateway.decode.policy = Watching()
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": stream}
        reply = await running.post(json.dumps(body).encode())
        assert reply.status == 200
        await eventually(lambda: bool(policy.ends))
        assert [served and served.tokens for served in policy.ends] == [tokens]


@story
async def test_a_policy_that_watches_is_told_nothing_of_a_reply_that_failed() -> None:
    async with cluster() as running:
        policy = running.gateway.decode.policy = Watching()
        for engine in running.decode:
            engine.answer = reset
        assert (await running.post({"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True})).status == 502
        await eventually(lambda: len(policy.ends) == 2)  # at one worker, then at the other
        assert policy.ends == [None, None]
