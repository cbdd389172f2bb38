"""The states of expert servers: stories by hand, and laws over random ones."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, InputError
from coterie.experts.membership import (
    Accepted,
    Changed,
    Heartbeat,
    Leave,
    Membership,
    Refused,
    Register,
    Report,
    Settled,
    Tick,
    Timing,
    Unknown,
)
from coterie.experts.view import AllKnown, Change, Snapshot, View
from expert_members import fingerprint, server

TIMING = Timing(heartbeat_s=1, suspect_after_s=3, dead_after_s=10, joining_s=60, forget_after_s=100)
A, B = server("a", "01", "01"), server("b", "12", "12")
WHOLE, SPARE = server("whole", "0123", "0123"), server("spare", "0123", "0123")


def membership(*servers, now=0.0):
    """A monitor's members, serving, heard of at `now`."""
    made = Membership(TIMING, epoch=100, now=now)
    for one in servers:
        made.on(Register(one, "serving"), now)
    return made


def states(made):
    return {member.server.id: member.state for member in made.members}


# --- stories -----------------------------------------------------------------------------------------


def test_a_server_joins_serves_drains_and_leaves():
    made = Membership(TIMING, epoch=100, now=0)
    (joined, accepted) = made.on(Register(A, "joining"), 0)
    assert (joined.epoch, joined.member.state) == (101, "joining")
    assert accepted == Accepted(epoch=101, since=101, needed=True)
    seen = [made.on(Heartbeat("a", phase), 1)[0].member.state for phase in ("serving", "draining")]
    assert seen == ["serving", "draining"]
    assert made.on(Leave("a"), 2)[0] == Changed(104, made.members[0])
    assert (made.members[0].state, made.members[0].reason) == ("dead", "it left")
    assert made.living == ()


def test_a_heartbeat_without_news_changes_nothing():
    made = membership(A)
    assert made.on(Heartbeat("a", "serving"), 1) == (Accepted(101, 101, needed=True),)


def test_a_silent_server_is_suspect_then_dead_and_back_when_it_registers_again():
    made = membership(WHOLE, SPARE)
    made.on(Heartbeat("spare", "serving"), 2.9)
    assert made.on(Tick(), 2.9) == ()
    assert [(one.member.server.id, one.member.reason) for one in made.on(Tick(), 3)] == [("whole", "silent for 3 s")]
    for now in (5, 8, 9.9):
        made.on(Heartbeat("spare", "serving"), now)
        assert made.on(Tick(), now) == ()
    assert [one.member.state for one in made.on(Tick(), 10) if isinstance(one, Changed)] == ["dead"]
    assert made.on(Heartbeat("whole", "serving"), 11) == (Unknown(),)
    (back, accepted) = made.on(Register(WHOLE, "serving", seen=made.epoch), 11)
    assert (back.member.state, accepted.since) == ("serving", 101)


def test_a_suspect_that_is_heard_of_serves_again():
    made = membership(WHOLE, SPARE)
    made.on(Tick(), 3)
    assert states(made) == {"whole": "suspect", "spare": "suspect"}
    made.on(Heartbeat("whole", "serving"), 4)
    assert states(made) == {"whole": "serving", "spare": "suspect"}


def test_a_warming_server_is_silent_for_long_and_not_dropped():
    made = membership(SPARE)
    made.on(Register(WHOLE, "joining"), 0)
    made.on(Tick(), 59)
    assert states(made)["whole"] == "joining"
    made.on(Heartbeat("spare", "serving"), 60)
    made.on(Tick(), 60)
    assert made.members[1].reason == "not ready after 60 s"


def test_the_last_owner_of_an_expert_is_not_dropped_for_silence():
    made = membership(A, B)  # 0 is a's alone
    made.on(Heartbeat("b", "serving"), 999)
    made.on(Tick(), 999)
    assert states(made) == {"a": "suspect", "b": "serving"}
    made.on(Register(WHOLE, "serving"), 999)
    made.on(Tick(), 999)
    assert states(made) == {"a": "dead", "b": "serving", "whole": "serving"}


def test_two_silent_replicas_do_not_vouch_for_each_other():
    made = membership(WHOLE, SPARE)
    made.on(Tick(), 999)
    assert set(states(made).values()) == {"suspect"}


def test_a_last_owner_that_drains_is_told_that_it_is_needed():
    made = membership(WHOLE)
    assert made.on(Heartbeat("whole", "draining"), 1)[-1].needed
    made.on(Register(SPARE, "joining"), 1)
    assert made.on(Heartbeat("whole", "draining"), 2)[-1].needed
    made.on(Heartbeat("spare", "serving"), 3)
    assert not made.on(Heartbeat("whole", "draining"), 4)[-1].needed


def test_a_draining_server_that_falls_silent_is_dead_if_others_have_its_experts():
    made = membership(WHOLE, SPARE)
    made.on(Heartbeat("whole", "draining"), 0)
    made.on(Heartbeat("spare", "serving"), 10)
    made.on(Tick(), 9)
    assert states(made)["whole"] == "draining"
    made.on(Tick(), 10)
    assert states(made)["whole"] == "dead"


def test_a_report_makes_suspect_until_the_next_heartbeat_and_proof_makes_dead():
    made = membership(A)
    (changed, accepted) = made.on(Report("a", by="client 7", dead=False), 1)
    assert (changed.member.state, changed.member.reason) == ("suspect", "it did not answer client 7")
    assert isinstance(accepted, Accepted)
    assert made.on(Report("a", by="client 8", dead=False), 1)[:-1] == ()
    made.on(Heartbeat("a", "serving"), 2)
    assert states(made) == {"a": "serving"}
    made.on(Report("a", by="client 7", dead=True), 3)
    assert states(made) == {"a": "dead"}
    assert made.on(Report("a", by="client 8", dead=True), 3) == (Unknown(),)


def test_a_server_started_again_is_another_one():
    made = membership(server("a", "01", "01", key="a1"), WHOLE)
    made.on(Register(server("a", "01", "01", key="a2"), "serving"), 1)
    made.on(Heartbeat("a2", "serving"), 10)
    made.on(Heartbeat("whole", "serving"), 10)
    made.on(Tick(), 10)
    assert states(made) == {"a1": "dead", "a2": "serving", "whole": "serving"}


def test_other_experts_have_a_new_epoch_and_the_same_ones_keep_theirs():
    made = membership(A, B)
    assert made.on(Register(A, "serving"), 1) == (Accepted(102, 101, needed=True),)
    (changed, accepted) = made.on(Register(server("a", "012", "012"), "serving"), 1)
    assert (changed.epoch, changed.member.server.since, accepted.since) == (103, 103, 103)


def test_a_new_monitor_goes_on_above_every_epoch_that_was_ever_told():
    made = Membership(TIMING, epoch=5, now=0)
    (changed, accepted) = made.on(Register(server("a", "01", since=101), "serving", seen=205), 0)
    assert (changed.epoch, accepted.since) == (206, 101)  # the server has the same experts as before


def test_a_server_of_another_model_is_refused_until_the_last_of_the_first_model_is_dead():
    made = membership(A)
    other = server("b", "01", "01", model="large")
    assert made.on(Register(other, "serving"), 1) == (
        Refused(
            f"b serves large (2 layers of 8 experts, fingerprint {fingerprint('large')[:12]}), "
            f"but a tiny (2 layers of 8 experts, fingerprint {fingerprint('tiny')[:12]}); "
            "one monitor has one model: start the server with the same checkpoint, or with another monitor"
        ),
    )
    assert isinstance(made.on(Register(server("b", "01"), "serving"), 1)[0], Refused)  # one layer
    made.on(Leave("a"), 2)
    assert isinstance(made.on(Register(other, "serving"), 3)[-1], Accepted)


def test_dead_servers_are_shown_for_a_while_and_then_forgotten():
    made = membership(A)
    made.on(Leave("a"), 1)
    made.on(Tick(), 100)
    assert states(made) == {"a": "dead"}
    assert made.on(Tick(), 101) == ()
    assert states(made) == {}


def test_it_settles_once_all_that_live_must_have_registered():
    made = Membership(TIMING, epoch=0, now=50)
    assert made.on(Tick(), 59.9) == ()
    assert made.on(Tick(), 60) == (Settled(1),)
    assert made.on(Tick(), 61) == ()


def test_times_out_of_order_are_refused():
    with pytest.raises(ConfigError, match=r"suspect after 0\.5 s, dead after 10 s; each must be longer"):
        Timing(suspect_after_s=0.5)
    with pytest.raises(ConfigError, match="joining and forgetting must be positive"):
        Timing(joining_s=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held": ("10",)}, "experts of layer 0 must ascend"),
        ({"held": ("0", "8")}, "experts of layer 1 must ascend, and be below 8"),
        ({"held": ()}, "0 layers of 8 experts"),
        ({"experts": 0}, "1 layers of 0 experts"),
        ({"tokens": 0}, "0 tokens since 0"),
        ({"since": -1}, "16 tokens since -1"),
        ({"key": "a\nb"}, r"id 'a\\nb'; need 1 to 1024 printable"),
        ({"model": ""}, "model ''; need 1 to 1024 printable"),
    ],
)
def test_a_server_that_says_nonsense_of_itself_is_refused(change, message):
    held = change.pop("held", ("01",))
    with pytest.raises(InputError, match=message):
        server("a", *held, **change)
    with pytest.raises(InputError, match=r"a: fingerprint 'F'; need 32 hex digits"):
        replace(A, fingerprint="F")


# --- laws --------------------------------------------------------------------------------------------

HELD = st.tuples(*[st.frozensets(st.sampled_from("0123")).map(lambda some: "".join(sorted(some)))] * 2)
IDS = st.sampled_from("abcd")
PHASES = st.sampled_from(["joining", "serving", "draining"])
REGISTER = st.builds(
    lambda name, held, phase, seen: Register(server(name, *held), phase, seen), IDS, HELD, PHASES, st.integers(0, 200)
)
GENTLE = st.one_of(REGISTER, st.builds(Heartbeat, IDS, PHASES), st.builds(Report, IDS, st.just("c"), st.just(False)))
ANY = st.one_of(GENTLE, st.builds(Leave, IDS), st.builds(Report, IDS, st.just("c"), st.just(True)))
WAIT = st.sampled_from([0.0, 0.5, 2.0, 4.0, 12.0, 70.0])


def story(events):
    """Times and events, with a tick before each."""
    return st.lists(st.tuples(WAIT, events), max_size=15)


def play(made, told):
    """Yields what each step of a story gives: its event, and its actions."""
    now = 0.0
    for wait_s, event in told:
        now += wait_s
        yield now, Tick(), made.on(Tick(), now)
        yield now, event, made.on(event, now)


def owned(made):
    return {
        (layer, expert)
        for member in made.living
        if member.state != "joining"
        for layer, ids in enumerate(member.server.held)
        for expert in ids
    }


@settings(max_examples=40)
@given(story(ANY))
def test_every_change_has_the_next_epoch_and_is_what_the_members_say(told):
    made = Membership(TIMING, epoch=100, now=0)
    last = made.epoch
    for _, event, actions in play(made, told):
        for action in actions:
            if isinstance(action, Changed | Settled):
                assert action.epoch == last + 1 or isinstance(event, Register)  # which may know of a later one
                assert action.epoch > last
                last = action.epoch
        changes = [action for action in actions if isinstance(action, Changed)]
        assert {one.member.server.id: one.member for one in changes}.items() <= {
            member.server.id: member for member in made.members
        }.items()
        answers = [isinstance(action, Accepted | Refused | Unknown) for action in actions]
        assert answers == [False] * (len(answers) - 1) + [True] or (isinstance(event, Tick) and not any(answers))


@settings(max_examples=40)
@given(story(GENTLE))
def test_no_expert_loses_its_last_owner_by_time(told):
    made = Membership(TIMING, epoch=100, now=0)
    before = set()
    for _, event, _ in play(made, told):
        if isinstance(event, Tick):
            assert before <= owned(made)
        before = owned(made)


@settings(max_examples=40)
@given(story(ANY))
def test_no_server_that_joins_is_dropped_before_its_time(told):
    made = Membership(TIMING, epoch=100, now=0)
    began = {}
    for now, event, _ in play(made, told):
        for key, state in states(made).items():
            if state == "joining":
                began.setdefault(key, now)
            elif key in began:
                first = began.pop(key)
                if isinstance(event, Tick):
                    assert state == "dead"
                    assert now - first >= TIMING.joining_s


@settings(max_examples=40)
@given(story(ANY), st.integers(0, 200))
def test_ticks_come_to_rest(told, wait_s):
    made = Membership(TIMING, epoch=100, now=0)
    now = max([at for at, _, _ in play(made, told)], default=0.0) + wait_s
    made.on(Tick(), now)
    assert made.on(Tick(), now) == ()


@settings(max_examples=40)
@given(story(ANY), st.integers(0, 30), st.integers(0, 30))
def test_a_client_that_saw_a_snapshot_and_every_later_change_knows_the_living(told, first, again):
    """It may also see changes twice, as one that resumes does."""
    made = Membership(TIMING, epoch=100, now=0)
    view = View()
    changes = []
    for step, (_, _, actions) in enumerate(play(made, told)):
        new = [Change(epoch=one.epoch, member=one.member) for one in actions if isinstance(one, Changed)]
        new += [AllKnown(epoch=one.epoch) for one in actions if isinstance(one, Settled)]
        changes += new
        if step == first:
            view = view.apply(Snapshot(run="r", epoch=made.epoch, settled=made.settled, members=made.living))
        elif step > first:
            for change in changes if step == again else new:
                view = view.apply(change)
    if view.run:
        assert view.members == {member.server.id: member for member in made.living}
        assert view.absent == {}
        assert (view.epoch, view.settled) == (made.epoch, made.settled) or not changes
