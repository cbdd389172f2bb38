"""KV from one host to another: over a real link, with no memory in common, also when the link is cut."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hosted_workers import HostedWorker
from workers import ending

from coterie.engines.embedded.kv import PREFIX
from network_hosts import two_hosts
from waiting import wait_until

RNG = np.random.default_rng(11)
HEADER_BYTES, BLOCKS = 4096, 400
LIMIT_S = "3"  # lease and deadline; the longest pull here takes half of it


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A prefill worker on one host and a decode worker on another."""
    weights = tmp_path_factory.mktemp("weights")
    limits = ("--kv-timeout", LIMIT_S, "--kv-lease", LIMIT_S)
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except PermissionError as error:
            pytest.skip(f"needs network namespaces: {error}")
        yield stack.enter_context(ending([HostedWorker(weights, host, *limits) for host in hosts]))


def some_prompt(tokens):
    return RNG.integers(100, 3900, tokens).tolist()


def tokens_of(reply):
    return reply["choices"][0]["token_ids"]


def kv_file(worker):
    (file,) = worker.shared_memory.glob(f"{PREFIX}*")
    return file


def kv_blocks(worker):
    """Its cache, `[blocks, bytes]`, as it is now."""
    return np.fromfile(kv_file(worker), np.uint8)[HEADER_BYTES:].reshape(BLOCKS, -1)


def kv_of(worker, params):
    """Bytes of the full blocks of a kept prompt."""
    return kv_blocks(worker)[params["remote_block_ids"][0][: params["remote_num_tokens"] // 16]].tobytes()


def filled(worker):
    """How many blocks of its cache were ever written."""
    return int(kv_blocks(worker).any(axis=1).sum())


def connections(worker, port):
    """How many of the host's TCP connections by a port a process holds: the states ESTABLISHED and CLOSE_WAIT."""
    fields = [line.split() for line in (worker.proc / "net/tcp").read_text().splitlines()[1:]]
    return sum(
        f":{port:04X}" in (local[8:], remote[8:]) and state in ("01", "08") for _, local, remote, state, *_ in fields
    )


def assert_nothing_is_left(holder, decode, port):
    wait_until(lambda: holder.metric("coterie:kv_leases") == 0, "the lease to run out")
    for worker in (holder, decode):
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            assert worker.metric(name) == 0
        wait_until(lambda worker=worker: not connections(worker, port), "the connection to be closed")
        assert len(list(worker.shared_memory.iterdir())) == 1  # its own cache


def test_kv_pulled_from_another_host_equals_the_holders_and_gives_the_same_output(pair):
    holder, decode = pair
    prompt = some_prompt(100)
    expected = tokens_of(holder.complete(prompt))
    theirs = holder.prefill(prompt)
    assert not (decode.shared_memory / kv_file(holder).name).exists()
    kv, computed = kv_of(holder, theirs), decode.metric("coterie:step_tokens_total")
    assert tokens_of(decode.complete(prompt, kv_transfer_params=theirs)) == expected
    assert decode.metric("coterie:step_tokens_total") - computed == 8, "the prompt was computed again"
    ours = decode.prefill(prompt)  # finds the pulled blocks in its cache
    assert kv_of(decode, ours) == kv
    assert any(kv)
    assert holder.metric("coterie:kv_leases") == 0
    holder.complete(prompt, kv_transfer_params=ours)  # and back, over the other direction


def test_a_link_that_is_cut_in_the_middle_of_a_pull_gives_an_error_and_leaves_nothing(pair):
    holder, decode = pair
    prompt = some_prompt(1000)  # 63 blocks, 2.6 MB
    expected = tokens_of(holder.complete(prompt))
    before, params = filled(decode), holder.prefill(prompt)
    port = params["remote_port"]
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(decode.post, prompt=prompt, max_tokens=4, kv_transfer_params=params)
        wait_until(lambda: filled(decode) >= before + 3, "the first blocks to arrive")
        decode.host.set_link("down")
        assert filled(decode) < before + 63, "the link was cut too late"
        assert [connections(worker, port) for worker in pair] == [1, 1]
        refused = pulling.result(20)
    assert refused.status_code == 500
    assert f"not received within {LIMIT_S} s" in refused.json()["error"]["message"]
    assert_nothing_is_left(holder, decode, port)
    unreachable = decode.post(prompt=prompt, max_tokens=4, kv_transfer_params=params)
    assert unreachable.status_code == 500
    assert "connection to the prefill worker failed" in unreachable.json()["error"]["message"]
    decode.host.set_link("up")
    again = decode.complete(prompt, kv_transfer_params=holder.prefill(prompt))
    assert tokens_of(again) == expected
    assert_nothing_is_left(holder, decode, port)
