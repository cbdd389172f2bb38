"""Streams of all kinds outlive a decode process that is killed under them: the client has what it would have had."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fault_cluster import FaultCluster

from vllm_streams import Seen, seen
from waiting import wait_until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True}}
ASK = {"model": "tiny", "temperature": 0, "stream": True, "ignore_eos": True, "max_tokens": 80}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once upon a time", **USAGE}),
    (COMPLETIONS, {"prompt": "Es war einmal", "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "你好，世界。", "max_tokens": 60}),  # characters of several tokens
    (COMPLETIONS, {"prompt": "SELECT name FROM", "stop": ["no such text"], **USAGE}),
    (COMPLETIONS, {"prompt": "def main(args):\n    ", "stop": ["\n\n\n\n", "zzz"], "return_token_ids": True}),
    (CHAT, {"messages": [{"role": "user", "content": "Tell me a story."}], **USAGE}),
    (CHAT, {"messages": [{"role": "user", "content": "Il y a"}], "max_tokens": None, "max_completion_tokens": 70}),
    (CHAT, {"messages": [{"role": "user", "content": "The king"}], "stop": "\n\n", "min_tokens": 60, **USAGE}),
    (CHAT, {"messages": [{"role": "user", "content": "naïve café"}], "return_token_ids": True}),
]


class Watched:
    """One stream as its client reads it.

    Attributes:
        events: that have come.
    """

    def __init__(self, cluster: FaultCluster, path: str, body: dict[str, Any]) -> None:
        self.events: list[bytes] = []
        self._cluster = cluster
        self._path = path
        self._body = {**ASK, **body}

    def read(self) -> Seen:
        """What the client has in the end."""
        data = b""
        with (
            httpx.Client(timeout=30, trust_env=False) as client,
            client.stream("POST", self._cluster.gateway.url + self._path, json=self._body) as reply,
        ):
            assert reply.status_code == 200
            for part in reply.iter_raw():
                data += part
                self.events = data.split(b"\n\n")[:-1]
        result = seen(self.events)
        result.identities = {json.dumps(json.loads(one)[1::2]) for one in result.identities}  # but for id and time
        for usage in result.usage:
            cached = usage.pop("prompt_tokens_details")["cached_tokens"]  # what was cached differs from run to run
            assert 0 <= cached <= usage["prompt_tokens"]
        return result


def outcomes(cluster: FaultCluster) -> dict[str, float]:
    lines = httpx.get(f"{cluster.admin_url}/metrics", timeout=5, trust_env=False).text.splitlines()
    found = [line for line in lines if line.startswith("coterie_continuations_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


@pytest.fixture(scope="module")
def undisturbed(cluster: FaultCluster) -> list[Seen]:
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        return list(pool.map(lambda stream: Watched(cluster, *stream).read(), STREAMS))


def test_streams_outlive_a_decode_process_that_is_killed(cluster: FaultCluster, undisturbed: list[Seen]) -> None:
    before = outcomes(cluster).get("resumed", 0)
    streams = [Watched(cluster, *stream) for stream in STREAMS]
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        wait_until(lambda: all(len(stream.events) > 8 for stream in streams), what="the beginning of all streams")
        victim = cluster.engines["decode"][1]
        held = cluster.workers()[victim.name]["requests"]
        victim.kill()
        found = [future.result() for future in reading]
    try:
        assert held >= 2  # three workers in turn have nine streams
        assert outcomes(cluster)["resumed"] - before == held
        for stream, got, expected in zip(STREAMS, found, undisturbed, strict=True):
            assert got == expected, stream
    finally:
        victim.restart()
    wait_until(cluster.all_available, what="the return of the worker")
    wait_until(cluster.nothing_held, what="the end of all load")
