"""Servers and clients of a monitor on real sockets: it comes, goes and comes back."""

import http.client
import json
import re
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from coterie.cli.experts_status import status
from coterie.errors import ConfigError, EngineError
from coterie.experts.follower import Follower
from coterie.experts.members import Member
from coterie.experts.membership import Register
from coterie.experts.monitor.calls import RefusedError, ask
from coterie.experts.monitor.messages import MAX_BODY_BYTES, Load, Pulse, Status, Suggestion, Welcome
from coterie.experts.registration import Account, Registration
from expert_members import fingerprint, server
from running_monitor import running_monitor, until


class FakeServer:
    """What an expert server tells its monitor; changed by the test."""

    def __init__(self, url, name, *held, phase="serving"):
        self.server, self.phase, self.pairs = server(name, *held), phase, 0
        self.welcomes = []
        self.registration = Registration(url, self._account, self.welcomes.append)
        self.registration.start()

    def _account(self):
        load = Load(tuple((self.pairs,) * len(layer) for layer in self.server.held), requests=self.pairs)
        return Account(self.server, self.phase, load)

    def become(self, phase):
        self.phase = phase
        self.registration.tell()


@pytest.fixture
def closing():
    """Closes what is put into it."""
    opened = []
    yield lambda one: opened.append(one) or one
    for one in reversed(opened):
        getattr(one, "registration", one).close()


@pytest.fixture
def follow(closing):
    def following(url):
        follower = closing(Follower(url, "client"))
        follower.start()
        return follower

    return following


def states(follower):
    return {member.server.id: member.state for member in follower.view.all}


def test_a_client_sees_servers_join_serve_drain_and_leave(closing, follow):
    with running_monitor() as url:
        follower = follow(url)
        one = closing(FakeServer(url, "a", "01", phase="joining"))
        for phase in ("joining", "serving", "draining"):
            one.become(phase)
            until(lambda phase=phase: states(follower) == {"a": phase})
        assert until(lambda: one.registration.welcome).needed
        one.registration.close()
        until(lambda: states(follower) == {})


def test_new_experts_are_told_with_the_epoch_since_when_they_count(closing, follow):
    with running_monitor() as url:
        follower = follow(url)
        one = closing(FakeServer(url, "a", "01"))
        until(lambda: states(follower) == {"a": "serving"})
        first = until(lambda: one.welcomes)[-1].since
        one.server = server("a", "23")
        one.registration.tell()
        until(lambda: follower.view.members["a"].server.held == ((2, 3),))
        since = follower.view.members["a"].server.since
        assert first < since <= follower.view.epoch
        until(lambda: one.welcomes[-1].since == since)


def test_a_monitor_that_ends_takes_nothing_away_and_a_new_one_learns_all_again(closing, follow):
    with running_monitor() as url:
        follower = follow(url)
        servers = [closing(FakeServer(url, name, "01")) for name in "ab"]
        until(lambda: states(follower) == {"a": "serving", "b": "serving"})
        before = follower.view
    assert until(lambda: follower.problem)
    assert follower.view is before
    servers[1].registration.close()  # it ends while nobody is told
    assert states(follower) == {"a": "serving", "b": "serving"}
    with running_monitor(urlsplit(url).port):
        until(lambda: follower.view.run != before.run and "a" in follower.view.members)
        assert states(follower)["a"] == "serving"
        assert follower.view.epoch > before.epoch
        assert follower.view.members["a"].server.since == before.members["a"].server.since  # the same experts
        until(lambda: states(follower) == {"a": "serving"})  # once it has settled, b is gone


def test_a_silent_server_is_suspect_and_heard_of_again(follow):
    with running_monitor() as url:
        follower = follow(url)
        ask(url, "POST", "/register", Welcome, Register(server("a", "01"), "serving"))
        until(lambda: states(follower) == {"a": "suspect"})
        ask(url, "POST", "/heartbeat", Welcome, Pulse("a", "serving"))
        until(lambda: states(follower) == {"a": "serving"})


def test_a_clients_report_is_told_to_the_others(closing, follow):
    with running_monitor() as url:
        one, other = follow(url), follow(url)
        closing(FakeServer(url, "a", "01"))
        until(lambda: states(one) == states(other) == {"a": "serving"})
        view = other.view
        one.report("a", dead=True)
        assert other.await_newer(view, 20) is not view
        until(lambda: states(other) == {"a": "serving"})  # it lives, and registers again
        assert other.view.members["a"].server.since == view.members["a"].server.since
        one.report("nobody", dead=True)  # the monitor's refusal ends nothing
        one.report("a", dead=False)
        until(lambda: other.view.epoch >= view.epoch + 3)


def test_a_server_of_another_model_is_refused_and_tries_on(closing, caplog):
    with running_monitor() as url:
        closing(FakeServer(url, "a", "01"))
        until(lambda: ask(url, "GET", "/status", Status).servers)
        closing(FakeServer(url, "b", "01", "01"))
        until(lambda: re.search(r"b serves tiny \(2 layers of 8 experts, .*, but a tiny \(1 layers", caplog.text))


def test_status_and_a_placement_are_given(closing):
    with running_monitor() as url:
        runner = CliRunner()
        assert "0 clients follow" in runner.invoke(status, ["--monitor", url]).output
        with pytest.raises(RefusedError, match="no server serves"):
            ask(url, "GET", "/placement", Suggestion)
        one, two = (closing(FakeServer(url, name, held)) for name, held in (("a", "0123"), ("b", "4567")))
        until(lambda: len(ask(url, "GET", "/status", Status).servers) == 2)

        def loaded():
            one.pairs += 100
            return ask(url, "GET", "/status", Status).coverage.imbalance

        until(lambda: loaded() == 2)  # 1 while one of them alone is known to serve
        assert two.pairs == 0
        suggestion = ask(url, "GET", "/placement", Suggestion)
        assert (suggestion.imbalance, suggestion.suggested) == (2, 1)
        assert suggestion.copies == 4  # two of a's experts to b, two of b's, which nobody asks for, to a
        shown = runner.invoke(status, ["--monitor", url]).output
        assert f"tiny: 1 layers of 8 experts, fingerprint {fingerprint()[:12]}" in shown
        assert "8 on 1" in shown
        assert "busiest server over that of the mean server: 2.00" in shown
        assert sorted(line.split()[:2] for line in shown.splitlines()[-2:]) == [["a", "serving"], ["b", "serving"]]
        rows = json.loads(runner.invoke(status, ["--monitor", url, "--json"]).output)["servers"]
        seen = sorted((row["name"], row["held"], row["requests"] > 0) for row in rows)
        assert seen == [("a", 4, True), ("b", 4, False)]


def test_experts_without_an_owner_are_named(closing):
    with running_monitor() as url:
        closing(FakeServer(url, "a", "0134567"))
        coverage = until(lambda: ask(url, "GET", "/status", Status).coverage if _served(url) else None)
        assert (coverage.missing, coverage.first_missing, coverage.replicas) == (1, (0, 2), {0: 1, 1: 7})
        assert "no server has: 1, layer 0 expert 2 first" in CliRunner().invoke(status, ["--monitor", url]).output


def test_metrics_count_servers_by_state_and_name_each_that_lives(closing):
    with running_monitor() as url:
        for name in "ab":
            closing(FakeServer(url, name, "01"))
        gone = FakeServer(url, "c", "2")
        until(lambda: len(_served(url)) == 3)
        gone.registration.close()
        text = httpx.get(f"{url}/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        prefix = "coterie_expert_monitor_"
        assert values[prefix + 'servers{state="serving"}'] == "2.0"
        assert values[prefix + 'servers{state="dead"}'] == "1.0"
        assert values[prefix + "missing_experts"] == "6.0"
        assert values[prefix + "single_experts"] == "0.0"
        assert {key for key in values if "silent_seconds" in key} == {
            prefix + f'silent_seconds{{server="{name}"}}' for name in "ab"
        }
        assert prefix + "imbalance" not in values  # no load


def _served(url):
    return [row for row in ask(url, "GET", "/status", Status).servers if row.state == "serving"]


# --- what is not taken -------------------------------------------------------------------------------


def post(url, path, body, content_type="application/json"):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request("POST", path, body, {"content-type": content_type})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()).get("problem", "")
    connection.close()
    return found


REGISTER = msgspec.json.encode(Register(server("a", "01"), "serving"))


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("/register", b"{", 400, "the body: "),
        ("/register", b"{}", 400, "required field `server`"),
        ("/register", REGISTER.replace(b"serving", b"dead"), 400, "Invalid enum value"),
        ("/register", REGISTER.replace(b"[0,1]", b"[1,0]"), 409, "experts of layer 0 must ascend"),
        ("/register", b" " * (MAX_BODY_BYTES + 1), 413, "larger than"),
        ("/heartbeat", b'{"id": "x", "phase": "serving"}', 404, "no such server"),
        ("/leave", b'{"id": "x"}', 404, "no such server"),
        ("/report", b'{"id": "x", "by": "y", "dead": true}', 404, "no such server"),
        ("/report", b'{"id": "x", "by": "y", "dead": 1}', 400, "Expected `bool`"),
        ("/status", b"{}", 405, "Method Not Allowed"),
        ("/nothing", b"{}", 404, "Not Found"),
    ],
)
def test_a_request_that_cannot_be_read_is_answered_and_changes_nothing(monitor_url, path, body, status, problem):
    found = post(monitor_url, path, body)
    assert found[0] == status
    assert problem in found[1]
    assert ask(monitor_url, "GET", "/status", Status).servers == []


@pytest.fixture(scope="module")
def monitor_url():
    with running_monitor() as url:
        yield url


def test_a_page_cannot_post_to_it(monitor_url):
    assert post(monitor_url, "/register", REGISTER, "text/plain")[0] == 415


def test_a_load_that_does_not_fit_is_refused(monitor_url):
    ask(monitor_url, "POST", "/register", Welcome, Register(server("a", "01"), "serving"))
    with pytest.raises(RefusedError, match="one number for each of its experts"):
        ask(monitor_url, "POST", "/heartbeat", Welcome, Pulse("a", "serving", Load(((1,),))))
    assert post(monitor_url, "/leave", b'{"id": "a"}')[0] == 200


@pytest.mark.parametrize("after", ["x", "-1", "9" * 20])
def test_following_after_no_epoch_is_refused(monitor_url, after):
    with pytest.raises(RefusedError, match="must be an epoch"):
        ask(monitor_url, "GET", f"/members?after={after}", Member)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://host", "https://host:1", "http://host:x", "http://host:1/path"])
def test_what_is_no_url_of_a_monitor_is_refused(url):
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        Follower(url, "client")


def test_a_monitor_that_is_not_there_is_said_so():
    with running_monitor() as url:
        pass
    with pytest.raises(EngineError, match=r"cannot be reached: .*; is it running"):
        ask(url, "GET", "/status", Status)
