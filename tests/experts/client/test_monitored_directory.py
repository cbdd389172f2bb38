"""Routing tables from what a monitor tells."""

import re
import time

import pytest

from coterie.core import ModelGeometry
from coterie.errors import EngineError
from coterie.experts.client import MonitoredDirectory, Server
from coterie.experts.client.monitored import routing_table
from coterie.experts.members import Member
from coterie.experts.membership import Leave, Register
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import Status, Welcome
from coterie.experts.view import View
from expert_members import fingerprint, server
from running_monitor import running_monitor, until

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=2)


def view(*members):
    return View("run", 7, True, {member.server.id: member for member in members}, {})


def member(name, held, state="serving", *, tokens=16):
    return Member(server(name, held, experts=4, tokens=tokens), state)


def names(table):
    return ["".join(one.name for one in owners) for owners in table.owners[0]]


def test_serving_owners_are_asked_and_draining_and_suspect_ones_only_where_there_is_no_better():
    members = (
        member("b", "01"), member("a", "0"), member("d", "012", "draining"),
        member("s", "0123", "suspect"), member("j", "0123", "joining"),
    )  # fmt: skip
    table = routing_table(view(*members), GEOMETRY, fingerprint(), tokens=1)
    assert names(table) == ["ab", "b", "d", "s"]
    assert (table.epoch, table.tokens) == (7, 16)
    assert table.owners[0][1] == (Server("b", "/dev/shm/coterie-experts-b", "http://127.0.0.1:1/b"),)


def test_a_request_must_fit_every_server():
    assert (
        routing_table(
            view(member("a", "0", tokens=9), member("b", "1", tokens=5)), GEOMETRY, fingerprint(), tokens=1
        ).tokens
        == 5
    )


@pytest.mark.parametrize("other", [{"experts": 5}, {"experts": 4, "model": "tiny, another revision"}])
def test_servers_of_another_model_are_left_out(other):
    table = routing_table(view(Member(server("a", "01", **other), "serving")), GEOMETRY, fingerprint(), tokens=3)
    assert (names(table), table.tokens) == (["", "", "", ""], 3)


@pytest.fixture
def monitor():
    with running_monitor() as url:
        yield url


@pytest.fixture
def directory(monitor):
    made = MonitoredDirectory(monitor, GEOMETRY, fingerprint(), "client")
    yield made
    made.close()


def register(url, name, held, *, experts=4):
    ask(url, "POST", "/register", Welcome, Register(server(name, held, experts=experts), "serving"))


def test_a_table_is_there_as_soon_as_the_monitor_tells(monitor, directory):
    before = directory.table()
    assert names(before) == [""] * 4
    register(monitor, "a", "0123")
    directory.await_all(time.monotonic() + 20)
    assert names(directory.table()) == ["a"] * 4
    assert directory.table().epoch > before.epoch
    directory.await_newer(before, time.monotonic() + 1e9)  # there is one already


def test_waiting_for_a_newer_table_ends_with_it_or_in_time(monitor, directory):
    register(monitor, "a", "0123")
    directory.await_all(time.monotonic() + 20)
    table = directory.table()
    directory.await_newer(table, time.monotonic() + 0.01)
    directory.await_newer(table, time.monotonic() - 1)
    assert directory.table() is table
    ask(monitor, "POST", "/leave", Welcome, Leave("a"))
    directory.await_newer(table, time.monotonic() + 20)
    assert names(directory.table()) == [""] * 4


def test_experts_without_a_server_are_named_when_the_time_is_over(monitor, directory, caplog):
    register(monitor, "a", "01", experts=5)
    kind = rf"tiny \(1 layers of 5 experts, fingerprint {fingerprint()[:12]}\)"
    said = rf"server a is of another model: it serves {kind}, this client's has the fingerprint {fingerprint()[:12]}"
    until(lambda: re.search(said, caplog.text))
    with pytest.raises(
        EngineError,
        match=rf"4 experts of 1 layers x 4 experts, top-2, fingerprint {fingerprint()[:12]}, have no server, "
        rf"layer 0 expert 0 first; the monitor knows a \((serving|suspect)\) of {kind}; start servers of them",
    ):
        directory.await_all(time.monotonic())


def test_doubts_are_told_to_the_monitor(monitor, directory):
    register(monitor, "a", "0123")
    directory.await_all(time.monotonic() + 20)
    (owner,) = directory.table().owners[0][0]
    directory.doubt(owner, gone=True)
    until(lambda: ask(monitor, "GET", "/status", Status).servers[0].state == "dead")
    directory.doubt(Server("x", "nowhere"), gone=True)
