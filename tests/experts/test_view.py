"""What clients keep of the expert servers while monitors come and go."""

from coterie.experts.members import Member
from coterie.experts.view import AllKnown, Beat, Change, Snapshot, View
from expert_members import server


def serving(*servers):
    return tuple(Member(one, "serving") for one in servers)


def snapshot(*members, run="1", epoch=10, settled=True):
    return Snapshot(run=run, epoch=epoch, settled=settled, members=members)


def known(view):
    return {member.server.id: member.state for member in view.all}


A, B, BOTH = server("a", "01"), server("b", "12"), server("both", "012")


def test_changes_add_and_remove_members():
    view = View().apply(snapshot(*serving(A)))
    view = view.apply(Change(epoch=11, member=Member(B, "joining"))).apply(Beat(epoch=11))
    assert (view.epoch, known(view)) == (11, {"a": "serving", "b": "joining"})
    assert known(view.apply(Change(epoch=12, member=Member(A, "dead", "it left")))) == {"b": "joining"}


def test_a_change_that_was_seen_changes_nothing():
    view = View().apply(snapshot(*serving(A)))
    assert view.apply(Change(epoch=10, member=Member(A, "dead"))) is view


def test_a_monitor_that_starts_takes_no_server_away_before_it_has_settled():
    view = View().apply(snapshot(*serving(A, B))).apply(snapshot(run="2", epoch=20, settled=False))
    assert (view.epoch, known(view)) == (20, {"a": "serving", "b": "serving"})
    view = view.apply(Change(epoch=21, member=Member(B, "serving")))
    assert (set(view.members), set(view.absent)) == ({"b"}, {"a"})
    assert view.absent["a"].state == "serving"


def test_who_has_not_come_back_when_the_monitor_settles_is_gone_unless_it_is_a_last_owner():
    view = View().apply(snapshot(*serving(A, BOTH))).apply(snapshot(run="2", settled=False))
    assert known(view.apply(snapshot(*serving(BOTH), run="2"))) == {"both": "serving"}
    view = view.apply(Change(epoch=11, member=Member(A, "serving"))).apply(AllKnown(epoch=12))
    assert view.apply(AllKnown(epoch=12)) is view
    assert known(view) == {"a": "serving", "both": "suspect"}  # 2 is its alone
    assert view.absent["both"].reason == "the monitor has not heard of it"
    joining = view.apply(Change(epoch=13, member=Member(B, "joining")))
    assert known(joining) == {"a": "serving", "both": "suspect", "b": "joining"}
    assert known(joining.apply(Change(epoch=14, member=Member(B, "serving")))) == {"a": "serving", "b": "serving"}


def test_an_absent_server_whose_end_is_told_is_gone():
    view = View().apply(snapshot(*serving(A))).apply(snapshot(run="2", settled=False))
    assert known(view.apply(Change(epoch=11, member=Member(A, "dead")))) == {}
