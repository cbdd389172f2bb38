"""The monitor without its socket: what followers are told, and how it keeps time."""

import asyncio

import msgspec
import pytest

from coterie.clock import ManualClock
from coterie.experts.membership import Heartbeat, Leave, Register, Tick, Timing
from coterie.experts.monitor.log import LENGTH, ChangeLog
from coterie.experts.monitor.monitor import Awake, Monitor
from coterie.experts.view import AllKnown, Beat, Change, Message, Snapshot, View
from expert_members import server

TIMING = Timing(heartbeat_s=1, suspect_after_s=3, dead_after_s=10)
A, B = server("a", "01"), server("b", "01")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def monitor(clock):
    return Monitor(TIMING, clock, run="this", epoch=100)


class Follower:
    """Reads lines one by one."""

    def __init__(self, monitor, run="", after=0):
        self._lines = monitor.follow(run, after)

    async def next(self):
        return msgspec.json.decode(await anext(self._lines), type=Message)

    async def rest(self):
        return [msgspec.json.decode(line, type=Message) async for line in self._lines]


def pass_time(monitor, clock, seconds):
    """In steps of a second, as an awake monitor has it."""
    for _ in range(seconds):
        clock.advance(1)
        monitor.hear(Tick())


def test_a_follower_gets_a_snapshot_and_then_each_change(monitor):
    async def story():
        monitor.hear(Register(A, "serving"))
        follower = Follower(monitor)
        first = await follower.next()
        assert (first.run, first.epoch, first.settled, [one.server.id for one in first.members]) == (
            "this",
            101,
            False,
            ["a"],
        )
        monitor.hear(Register(B, "joining"))
        monitor.hear(Heartbeat("b", "serving"))
        assert [(one.epoch, one.member.state) for one in (await follower.next(), await follower.next())] == [
            (102, "joining"),
            (103, "serving"),
        ]

    asyncio.run(story())


def test_a_follower_that_comes_back_gets_what_it_missed(monitor):
    async def story():
        monitor.hear(Register(A, "joining"))
        monitor.hear(Heartbeat("a", "serving"))
        monitor.hear(Leave("a"))
        follower = Follower(monitor, "this", 101)
        assert await follower.next() == Beat(epoch=101)
        assert [(await follower.next()).epoch for _ in range(2)] == [102, 103]

    asyncio.run(story())


@pytest.mark.parametrize(("run", "after"), [("other", 101), ("this", 99), ("this", 102)])
def test_a_follower_gets_a_snapshot_if_it_was_elsewhere_or_away_for_too_long(monitor, run, after):
    async def story():
        monitor.hear(Register(A, "serving"))
        assert isinstance(await Follower(monitor, run, after).next(), Snapshot)

    asyncio.run(story())


def test_followers_are_told_when_the_monitor_has_settled_even_those_that_come_back_later(monitor, clock):
    async def story():
        follower = Follower(monitor)
        assert not (await follower.next()).settled
        pass_time(monitor, clock, 10)
        assert await follower.next() == AllKnown(epoch=101)
        assert monitor.missed("this", 100) == [Beat(epoch=100), AllKnown(epoch=101)]
        assert monitor.missed("", 0)[0].settled

    asyncio.run(story())


def test_a_follower_that_does_not_read_is_cut_off_and_can_come_back_for_the_rest(monitor):
    async def story():
        monitor.hear(Register(A, "serving"))
        follower = Follower(monitor)
        view = View().apply(await follower.next())
        for _ in range(150):
            monitor.hear(Heartbeat("a", "draining"))
            monitor.hear(Heartbeat("a", "serving"))
        assert monitor.followers == 0
        assert await follower.rest() == []
        back = Follower(monitor, view.run, view.epoch)
        for _ in range(301):
            view = view.apply(await back.next())
        assert view.epoch == monitor.membership.epoch == 401

    asyncio.run(story())


def test_a_follower_that_leaves_is_forgotten(monitor):
    async def story():
        lines = monitor.follow("", 0)
        await anext(lines)
        assert monitor.followers == 1
        await lines.aclose()
        assert monitor.followers == 0

    asyncio.run(story())


def test_each_change_is_logged_with_its_reason(monitor, caplog):
    caplog.set_level("INFO")
    monitor.hear(Register(A, "serving"))
    monitor.hear(Heartbeat("a", "serving"))
    monitor.hear(Leave("a"))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "epoch 101: a (a) is serving"),
        ("WARNING", "epoch 102: a (a) is dead: it left"),
    ]


def test_servers_are_not_blamed_for_a_pause_of_the_monitor(monitor, clock):
    monitor.hear(Register(A, "serving"))
    clock.advance(3600)  # it was suspended
    monitor.hear(Tick())
    assert monitor.membership.members[0].state == "serving"
    assert monitor.silent_s("a") == 1
    pass_time(monitor, clock, 2)
    assert monitor.membership.members[0].state == "suspect"


def test_an_awake_clock_goes_by_one_step_at_most():
    clock = ManualClock(50)
    awake = Awake(clock, 2)
    clock.advance(1.5)
    assert awake.now() == 1.5
    clock.advance(10)
    assert awake.now() == awake.now() == 3.5


def test_a_log_knows_its_last_changes():
    log = ChangeLog(100)
    member = Monitor(TIMING, ManualClock(), run="", epoch=0)
    member.hear(Register(A, "serving"))
    changes = [Change(epoch=101 + i, member=member.membership.members[0]) for i in range(LENGTH + 2)]
    assert log.after(100) == []
    assert log.after(99) is None
    for change in changes:
        log.add(change)
    assert log.after(101) is None
    assert log.after(102) == changes[2:]
    assert log.after(101 + LENGTH) == changes[-1:]
    assert log.after(103 + LENGTH) is None
