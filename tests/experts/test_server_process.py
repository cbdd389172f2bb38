"""`coterie experts serve` as processes: what clients get, what is shown, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from coterie.cli.experts_bench import bench, calls
from coterie.cli.experts_serve import serve
from coterie.errors import ConfigError, EngineError, InputError, UnsupportedError
from coterie.experts.bench import BenchConfig, BenchRow, measure
from coterie.experts.protocol import Request, Status
from coterie.experts.server import ExpertServer, ModelingKernel, load_experts, parse_experts, process
from coterie.experts.server.process import ServeConfig, Serving, _serve, _until
from coterie.experts.transport import SharedClient, SharedServer
from coterie.experts.transport.identity import own_identity
from coterie.experts.transport.tcp import TcpServer
from coterie.http_server import listen
from coterie.modeling.expert_tensors import ExpertFiles
from expert_processes import expert_server
from running_monitor import running_monitor, until
from tiny_checkpoints import write_checkpoint

DEADLINE_S = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def local(checkpoint):
    """All experts in this process."""
    files, kernel = ExpertFiles.open(checkpoint), ModelingKernel()
    return ExpertServer(
        files.model, kernel, load_experts(files, parse_experts("all", files.model.geometry), kernel, since=0)
    )


@pytest.fixture(scope="module")
def pool(checkpoint):
    """A monitor, and two servers that share the experts."""
    with (
        running_monitor() as monitor,
        expert_server(checkpoint, "--experts", "0-3", "--monitor", monitor, "--name", "low") as low,
        expert_server(checkpoint, "--experts", "4-7", "--monitor", monitor, "--name", "high") as high,
    ):
        until(lambda: all(server.config["since"] for server in (low, high)))
        yield SimpleNamespace(monitor=monitor, low=low, high=high)


def random_request(seed, tokens, experts=range(8), epoch=0, layer=0):
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.array(experts, np.int32), (tokens, 1)), axis=1)[:, :2].copy()
    hidden, weights = rng.standard_normal((tokens, 64), np.float32), rng.random((tokens, 2), np.float32)
    return Request(layer, epoch, own_identity(), hidden, ids, weights)


def ask(server, request):
    client = SharedClient(server.shared)
    try:
        return client.call(request, DEADLINE_S)
    finally:
        client.close()


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_server_in_another_process_gives_the_local_layer_s_bits(tokens, pool, local):
    request = random_request(tokens, tokens, range(4), epoch=pool.low.config["since"])
    np.testing.assert_array_equal(ask(pool.low, request).sums, local.compute([request])[0].sums)


def test_servers_that_are_asked_at_once_give_parts_of_the_local_layer_s_sums(pool, local):
    request = random_request(0, 40)
    deadline_s, epoch = time.monotonic() + DEADLINE_S, max(pool.low.config["since"], pool.high.config["since"])
    clients = [SharedClient(server.shared) for server in (pool.low, pool.high)]
    owns = (request.ids < 4, request.ids >= 4)
    pending = [
        client.post(
            Request(0, epoch, own_identity(), request.hidden, np.where(own, request.ids, np.int32(-1)), request.weights)
        )
        for client, own in zip(clients, owns, strict=True)
    ]
    total = sum(one.wait(deadline_s).sums for one in pending)
    for client in clients:
        client.close()
    expected = local.compute([request])[0].sums
    assert np.abs(total - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_client_that_does_not_know_the_server_s_experts_is_told(pool):
    since = pool.high.config["since"]
    replies = [ask(pool.high, random_request(0, 2, range(4), epoch=epoch)) for epoch in (since - 1, since)]
    assert [reply.status for reply in replies] == [Status.STALE, Status.ABSENT]
    assert {reply.epoch for reply in replies} == {since}


def test_what_a_server_has_done_is_shown_where_it_ran_and_at_the_monitor(pool):
    before = pool.high.get("/load").json()
    client = SharedClient(pool.high.shared)
    pending = client.post(random_request(0, 1))
    struct.pack_into("<I", client._slot._memory, 64 + 24, 9)  # a layer that the model does not have
    assert pending.wait(time.monotonic() + DEADLINE_S).status in (Status.MALFORMED, Status.STALE, Status.ABSENT)
    client.close()
    request = random_request(3, 5, (6, 7), epoch=pool.high.config["since"], layer=1)
    ask(pool.high, request)
    after = until(lambda: after if (after := pool.high.get("/load").json())["batches"] > before["batches"] else None)
    assert (np.array(after["load"]) - before["load"]).tolist() == [[0] * 8, [0] * 6 + [5, 5]]
    assert [after[name] - before[name] for name in ("batches", "merged", "tokens", "active")] == [1, 1, 5, 2]
    assert after["queue"] == after["clients"] == 0
    families = {family.name: family for family in text_string_to_metric_families(pool.high.get("/metrics").text)}
    computed = {sample.labels["status"]: sample.value for sample in families["coterie_expert_server_requests"].samples}
    assert computed == {name: float(count) for name, count in after["requests"].items()}
    assert families["coterie_expert_server_held_experts"].samples[0].value == 8

    def row():
        rows = httpx.get(f"{pool.monitor}/status").json()["servers"]
        found = next(row for row in rows if row["name"] == "high")
        return found if found["batches"] == after["batches"] else None

    assert until(row)["state"] == "serving"
    assert pool.high.config["held"] == [[4, 5, 6, 7]] * 2


def test_clients_of_a_bench_ask_for_all_layers_and_its_table_has_a_row_for_each_size(checkpoint, pool):
    before = pool.low.get("/load").json()
    options = ["--tokens", "1", "--tokens", "5", "--clients", "2", "--seconds", "0.2", "--json"]
    result = CliRunner().invoke(bench, [str(checkpoint), "--monitor", pool.monitor, *options])
    rows = json.loads(result.stdout)
    assert [row["tokens"] for row in rows] == [1, 5]
    assert all(row["calls_per_s"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"] for row in rows)
    assert all(1 <= row["requests_per_batch"] <= 2 for row in rows)
    asked = np.array(pool.low.get("/load").json()["load"]) - before["load"]
    assert (asked[:, :4] > 0).all()
    assert not asked[:, 4:].any()
    assert calls([BenchRow(4, 10.0, 0.5, 2.25, None)]).rows == (("4", "10", "40", "0.500", "2.250", "-"),)


def test_a_bench_whose_servers_cannot_be_asked_ends_with_that(checkpoint, pool, monkeypatch):
    def counts(monitor):
        raise EngineError("a server was lost")

    monkeypatch.setattr("coterie.experts.bench._counts", counts)
    with pytest.raises(EngineError, match="a server was lost"):  # while its clients wait for it
        measure(BenchConfig(checkpoint, pool.monitor, tokens=(1,), seconds=0.1))


def test_what_a_client_of_a_bench_meets_is_its_error(tmp_path):
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        measure(BenchConfig(tmp_path, "http://127.0.0.1:1"))
    with pytest.raises(InputError, match="0 clients"):
        BenchConfig(tmp_path, "http://127.0.0.1:1", clients=0)


def test_a_server_that_is_told_to_end_says_so_and_serves_clients_that_have_nobody_else(checkpoint, local):
    with running_monitor() as monitor, expert_server(checkpoint, "--monitor", monitor) as server:
        request = random_request(0, 3, epoch=until(lambda: server.config["since"]))
        client, path = SharedClient(server.shared), server.shared
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health").status_code == 503)
        assert server.config["phase"] == "draining"
        np.testing.assert_array_equal(client.call(request, DEADLINE_S).sums, local.compute([request])[0].sums)
        client.close()
        assert server.process.wait(DEADLINE_S) == 0
        assert httpx.get(f"{monitor}/status").json()["servers"][0]["state"] == "dead"
    assert not path.exists()


@pytest.mark.slow
def test_a_second_signal_ends_at_once_however_busy_clients_are(checkpoint):
    with expert_server(checkpoint, "--drain", "3600") as server:
        client, over = SharedClient(server.shared), threading.Event()

        def keep_asking():
            with contextlib.suppress(EngineError):  # it has ended
                while not over.is_set():
                    client.call(random_request(0, 1), DEADLINE_S)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.config["phase"] == "draining")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(DEADLINE_S) == 0
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_server_that_is_told_to_end_while_it_loads_does_not_load_on(checkpoint):
    stop_at_first_layer = (
        "import os, time; from coterie.experts.server import holdings; load = holdings._load_layer; "
        "holdings._load_layer = lambda *a: (os.kill(os.getpid(), 15), time.sleep(0.3), load(*a))[-1] "
        "if a[1] == 0 else print('loaded', flush=True)"
    )
    with expert_server(checkpoint, prelude=stop_at_first_layer) as server:
        assert server.process.wait(DEADLINE_S) == 0
        assert server.url == ""  # it printed nothing


def fails(compute, timeout_s):
    raise MemoryError("no room")


def test_a_server_whose_thread_has_failed_ends_with_an_error():
    serving = Serving(SimpleNamespace(step=fails), SimpleNamespace(compute=None))
    with pytest.raises(EngineError, match=r"has stopped: MemoryError\('no room'\)"):
        asyncio.run(_until(asyncio.Event(), serving))
    serving.close()


def test_clients_that_hold_slots_by_http_are_let_go_where_a_server_stops_by_itself():
    over = asyncio.Event()
    serving = Serving(SimpleNamespace(step=fails), SimpleNamespace(compute=None))
    failing = SimpleNamespace(load=lambda progress: serving, over=over, phase="joining")
    signals = asyncio.Event(), asyncio.Event()
    with pytest.raises(EngineError, match="has stopped"):
        asyncio.run(_serve(failing, None, signals, lambda: None, lambda done, total: None))
    assert over.is_set()


@pytest.mark.parametrize("broken", ["Agent", "SharedServer", "TcpServer", "NixlServer"])
def test_a_server_that_cannot_open_one_of_its_ways_leaves_none_open(checkpoint, monkeypatch, broken):
    opened, threads = {}, threading.enumerate()
    agent = Mock()

    def opening(name, make):
        def open_it(*args):
            if name == broken:
                raise UnsupportedError("it cannot be opened")
            return opened.setdefault(name, make(*args))

        return open_it

    parts = {"listen": listen, "Agent": lambda name: agent, "SharedServer": SharedServer, "TcpServer": TcpServer}
    for name, make in {**parts, "NixlServer": None}.items():
        monkeypatch.setattr(process, name, opening(name, make))
    with pytest.raises(UnsupportedError, match="it cannot be opened"):
        process.ServerProcess(ServeConfig(checkpoint, tcp_port=0, nixl=True))
    assert opened["listen"].fileno() == -1
    assert agent.close.called == ("Agent" in opened)
    assert "SharedServer" not in opened or not opened["SharedServer"].path.exists()
    assert set(threading.enumerate()) <= set(threads)


def test_the_checkpoint_s_files_are_not_kept_in_memory(pool):
    assert "model.safetensors" not in Path(f"/proc/{pool.low.process.pid}/maps").read_text()


def test_what_cannot_be_served_is_one_error(checkpoint):
    result = CliRunner().invoke(serve, [str(checkpoint), "--experts", "0-8"])
    assert "from 0 to 7" in str(result.exception)
    with pytest.raises(ConfigError, match="slots is 0; it must be at least 1"):
        ServeConfig(checkpoint, slots=0)
    with pytest.raises(ConfigError, match="give --tcp-port, too"):
        ServeConfig(checkpoint, tcp_host="127.0.0.1")
    with pytest.raises(ConfigError, match=r"would look for '0\.0\.0\.0'; give --host an address"):
        ServeConfig(checkpoint, host="0.0.0.0", tcp_port=0, monitor="http://127.0.0.1:8100")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(serve, [str(checkpoint), "--tcp-port", str(taken.getsockname()[1])])
    assert "choose another --tcp-port" in str(result.exception)
