"""The fault scripts in simulation: the real rules of monitor, servers and clients, simulated processes and time."""

import itertools

import pytest

from coterie.clock import ManualClock
from coterie.experts.members import best_owners
from coterie.experts.membership import Accepted, Heartbeat, Leave, Register, Report, Tick, Timing
from coterie.experts.monitor.messages import Welcome
from coterie.experts.monitor.monitor import Monitor
from coterie.experts.registration import Account, Registrant
from coterie.experts.view import View
from expert_members import server
from fault_scripts import CLIENTS, CUTS, SCRIPTS, SERVERS

TIMING = Timing(heartbeat_s=0.25, suspect_after_s=1, dead_after_s=3)
STEP_S = 0.05
WARM_S = 0.4
HALVES = "0123", "4567"
REST_S = 12
ALL = SCRIPTS | CUTS


class SimServer:
    def __init__(self, world, name, life):
        self.world, self.name = world, name
        self.server = server(name, HALVES[SERVERS[name]], key=f"{name}.{life}")
        self.registrant = Registrant()
        self.began_s, self.beats_s = world.clock.now(), 0.0
        self.alive, self.stopped, self.slow, self.draining = True, False, False, False

    @property
    def phase(self):
        if self.draining:
            return "draining"
        return "serving" if self.world.clock.now() - self.began_s >= WARM_S else "joining"

    def step(self):
        now = self.world.clock.now()
        if not self.alive or self.stopped or now < self.beats_s:
            return
        self.beats_s = now + TIMING.heartbeat_s
        account = Account(self.server, self.phase)
        message = self.registrant.message(account)
        event = message if isinstance(message, Register) else Heartbeat(message.id, message.phase)
        answer = self.world.tell_monitor(event)
        if isinstance(answer, Accepted):
            self.registrant.welcomed(account, Welcome(answer.epoch, answer.since, answer.needed, TIMING.heartbeat_s))
            if self.draining and not answer.needed:
                self.world.tell_monitor(Leave(self.server.id))
                self.alive = False
        elif answer is not None:
            self.registrant.unknown()
            self.beats_s = now


class SimClient:
    def __init__(self, world, name):
        self.world, self.name, self.view, self.alive = world, name, View(), True
        self.turn = itertools.count()
        self.ready, self.failed, self.asked, self.resent = False, [], 0, 0
        self.doubted = set()

    def step(self):
        if not self.alive:
            return
        for message in self.world.missed(self.view):
            self.view = self.view.apply(message)
        self.ready = self.ready or (bool(self.view.all) and all(map(all, best_owners(self.view.all))))
        if self.ready:
            for half in HALVES:
                self.ask(int(half[0]))

    def ask(self, expert):
        self.asked += 1
        owners = best_owners(self.view.all)[0][expert]
        first = next(self.turn) % max(len(owners), 1)
        for owner in sorted(owners[first:] + owners[:first], key=lambda owner: owner.id in self.doubted):
            target = self.world.by_id[owner.id]
            if target.alive and not target.stopped and not target.slow:
                self.doubted.discard(owner.id)
                return
            self.resent += 1
            self.doubted.add(owner.id)
            self.world.tell_monitor(Report(owner.id, self.name, dead=not target.alive))
        self.failed.append((self.world.clock.now(), expert))


class World:
    def __init__(self):
        self.clock = ManualClock()
        self.monitor, self.monitor_stopped = None, False
        self.servers, self.by_id = {}, {}
        self.lives = itertools.count()
        for name in ("monitor", *SERVERS):
            self.play("start", name)
        self.clients = {name: SimClient(self, name) for name in CLIENTS}

    def tell_monitor(self, event):
        return self.monitor.hear(event) if self.monitor and not self.monitor_stopped else None

    def missed(self, view):
        return self.monitor.missed(view.run, view.epoch) if self.monitor and not self.monitor_stopped else []

    def play(self, what, who):
        if who == "monitor":
            self.play_monitor(what)
        elif what == "start":
            life = next(self.lives)
            one = self.servers[who] = SimServer(self, who, life)
            self.by_id[one.server.id] = one
        else:
            one = self.servers.get(who) or self.clients[who]
            name, value = {
                "kill": ("alive", False),
                "stop": ("stopped", True),
                "go on": ("stopped", False),
                "slow": ("slow", True),
                "fast": ("slow", False),
                "drain": ("draining", True),
                "cut": ("stopped", True),  # seen from outside, it is the same
                "mend": ("stopped", False),
            }[what]
            setattr(one, name, value)

    def play_monitor(self, what):
        if what == "start":
            self.monitor = Monitor(
                TIMING, self.clock, run=str(next(self.lives)), epoch=1000 + int(self.clock.now() * 1000)
            )
        elif what == "kill":
            self.monitor = None
        else:
            self.monitor_stopped = what == "stop"

    def step(self):
        self.clock.advance(STEP_S)
        self.tell_monitor(Tick())
        for one in (*self.servers.values(), *self.clients.values()):
            one.step()

    def run(self, script):
        """Yields after each step."""
        left = sorted(script, key=lambda step: step.at_s)
        while left or self.clock.now() < max(step.at_s for step in script) + REST_S:
            while left and left[0].at_s <= self.clock.now():
                step = left.pop(0)
                self.play(step.what, step.who)
            self.step()
            yield


def serving(world):
    return {one.server.id: "serving" for one in world.servers.values() if one.alive and not one.stopped}


def known(client):
    return {member.server.id: member.state for member in client.view.all}


@pytest.mark.parametrize("script", ALL.values(), ids=ALL)
def test_no_request_fails_and_all_is_known_in_the_end(script):
    world = World()
    for _ in world.run(script):
        pass
    for client in world.clients.values():
        assert client.asked > 100 or not client.alive
        assert client.failed == []
        assert known(client) == serving(world) or not client.alive
    assert world.monitor.membership.epoch == world.clients["c1"].view.epoch


@pytest.mark.parametrize("script", ALL.values(), ids=ALL)
def test_few_requests_are_sent_again(script):
    """Once for each client and fault, since after that the client knows; where the monitor is away, it remembers."""
    world = World()
    for _ in world.run(script):
        pass
    faults = sum(step.what in ("kill", "stop", "drain", "cut") for step in script)
    for client in world.clients.values():
        assert client.resent <= 10 * faults, client.resent


@pytest.mark.parametrize("script", ALL.values(), ids=ALL)
def test_no_server_that_runs_is_thought_dead(script):
    world, stopped = World(), set()
    for _ in world.run(script):
        if world.monitor:
            states = {member.server.id: member.state for member in world.monitor.membership.members}
            for key in serving(world).keys() - stopped:
                assert states.get(key) != "dead"
        stopped |= {key for key, one in world.by_id.items() if one.stopped}
