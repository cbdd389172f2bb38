"""Real worker processes whose experts are in real expert servers: the outputs of one that has them all."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from workers import TINY, running

from expert_processes import expert_server
from running_monitor import running_monitor, until

pytestmark = pytest.mark.slow  # five processes

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(100, 3900, length).tolist() for length in (3, 40, 150)]


@pytest.fixture(scope="module")
def monitor():
    with running_monitor() as url:
        yield url


@pytest.fixture(scope="module")
def servers(monitor):
    with (
        expert_server(TINY, "--monitor", monitor, "--name", "one") as one,
        expert_server(TINY, "--monitor", monitor, "--name", "two") as two,
    ):
        yield one, two


@pytest.fixture(scope="module")
def workers(servers, monitor, tmp_path_factory):
    """One that has its experts, and two that have none; of these, the second computes steps in halves."""
    remote = ("--experts-from", monitor)
    with running(tmp_path_factory.mktemp("weights"), (), remote, (*remote, "--experts-overlap", "2")) as workers:
        yield workers


def tokens_of(reply):
    return reply["choices"][0]["token_ids"]


def test_outputs_are_those_of_local_experts_and_none_is_mapped(workers):
    local, *clients = workers
    for prompt in PROMPTS:
        expected = tokens_of(local.complete(prompt, max_tokens=24))
        for client in clients:
            assert tokens_of(client.complete(prompt, max_tokens=24)) == expected
    for client in clients:
        mapped = (client.proc / "maps").read_text()
        assert "weights-no-experts.safetensors" in mapped
        assert "weights-64.safetensors" not in mapped


def test_kv_of_a_worker_with_experts_is_decoded_by_one_without(workers):
    local, client, _ = workers
    params = local.prefill(PROMPTS[2])
    reply = client.complete(PROMPTS[2], kv_transfer_params=params)
    assert tokens_of(reply) == tokens_of(local.complete(PROMPTS[2]))


def test_requests_of_one_batch_have_the_outputs_of_each_alone(workers):
    local, *clients = workers
    expected = [tokens_of(local.complete(prompt, max_tokens=60)) for prompt in PROMPTS]
    with ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
        turns = [(client, prompt) for prompt in PROMPTS for client in clients]
        got = threads.map(lambda turn: tokens_of(turn[0].complete(turn[1], max_tokens=60)), turns)
        assert list(got) == [tokens for tokens in expected for _ in clients]


def test_streams_go_on_with_the_same_tokens_when_one_of_two_replicas_is_killed(workers, servers):
    local, *clients = workers
    expected = [tokens_of(local.complete(prompt, max_tokens=120)) for prompt in PROMPTS] * 2
    got = [None] * 6

    def complete(number):
        got[number] = tokens_of(clients[number // 3].complete(PROMPTS[number % 3], max_tokens=120))

    threads = [threading.Thread(target=complete, args=(number,)) for number in range(6)]
    before = servers[1].get("/load").json()["requests"]["computed"]
    for thread in threads:
        thread.start()
    until(lambda: servers[1].get("/load").json()["requests"]["computed"] >= before + 20)
    os.kill(servers[1].process.pid, signal.SIGKILL)
    assert any(thread.is_alive() for thread in threads), "it was killed after the streams"
    for thread in threads:
        thread.join()
    assert got == expected
