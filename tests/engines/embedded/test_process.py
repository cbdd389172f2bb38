"""A worker's process, run in this one: how it ends when it cannot go on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import pytest
from workers import HTTP, TINY

from coterie.engines.embedded.process import WorkerConfig, default_weights_dir, run
from coterie.errors import ConfigError, EngineError, UnsupportedError
from coterie.latency import read_step_points
from coterie.modeling import Model


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(autouse=True)
def keep_switch_interval():
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def config(weights, **changes):
    return WorkerConfig(TINY, "tiny", **{"weights_dir": weights, "port": 0, "kv_blocks": 20, **changes})


def never(url, kernel):
    pytest.fail(f"it serves at {url}")


def test_a_step_that_fails_ends_the_process_and_every_request(weights, monkeypatch):
    replies = []

    def ask(url):
        replies.append(HTTP.post(f"{url}/v1/completions", json={"prompt": [1, 2]}))

    def fail(*_):
        raise ArithmeticError("a wrong turn")

    monkeypatch.setattr(Model, "forward", fail)
    threads = []

    def on_ready(url, kernel):
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()

    with pytest.raises(EngineError, match="a step failed: a wrong turn"):
        run(config(weights), on_ready=on_ready)
    threads[0].join()
    assert replies[0].status_code == 500
    assert "a wrong turn" in replies[0].json()["error"]["message"]


def test_decode_steps_are_written_down(weights, tmp_path):
    replies = []

    def ask(url):
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        replies.append(HTTP.post(f"{url}/v1/completions", json=body))
        os.kill(os.getpid(), signal.SIGTERM)

    threads = []

    def on_ready(url, *_):
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()

    run(config(weights, log_steps=tmp_path / "steps.csv"), on_ready=on_ready)
    threads[0].join()
    assert replies[0].status_code == 200
    steps = read_step_points(tmp_path / "steps.csv")  # the prompt's step is none of them
    assert [point.requests for point in steps] == [1] * 4
    assert {point.active for point in steps} == {5 * 4}  # layers x top-k


def test_a_port_that_is_taken_ends_the_start(weights):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another --port"):
            run(config(weights, port=port), on_ready=never)
        with pytest.raises(ConfigError, match="choose another --kv-port"):
            run(config(weights, kv_port=port), on_ready=never)


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"max_model_len": 5000}, ConfigError, "--max-model-len 5000 is more than the 2048"),
        ({"max_num_seqs": 600}, ConfigError, "512 tokens a step for 600 running requests"),
        ({"kv_blocks": 1 << 44}, UnsupportedError, "cannot reserve"),
        ({"kv_blocks": None, "kv_memory_mib": 1, "block_size": 1 << 20}, ConfigError, "--kv-memory 1 holds none"),
    ],
)
def test_sizes_that_cannot_be_end_the_start(weights, changes, error, problem):
    with pytest.raises(error, match=problem):
        run(config(weights, **changes), on_ready=never)


def test_each_checkpoint_has_a_folder_of_its_own_for_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    folder = default_weights_dir(TINY)
    assert str(folder).startswith("/cache/coterie/weights/coterie-tiny-")
    assert folder == default_weights_dir(TINY.parent / "." / "coterie-tiny")
    (tmp_path / "coterie-tiny").mkdir()
    assert default_weights_dir(tmp_path / "coterie-tiny") != folder
