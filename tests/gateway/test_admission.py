"""Who is let in, who waits and who is refused: the rule by laws, the waiting in an event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stories import story

from coterie.gateway.edge.admission import Admission, Gate, Ticket
from coterie.gateway.edge.http1 import RefusedError

TENANTS = st.sampled_from("abcd")


def entered(rule: Admission, tenants: str, since_s: float = 0.0) -> list[Ticket]:
    tickets = [Ticket(tenant, since_s) for tenant in tenants]
    for ticket in tickets:
        rule.enter(ticket)
    return tickets


def drained(rule: Admission, inside: Ticket) -> str:
    """The tenants in the order in which they are let in one after another, the first of them being in."""
    order = []
    while (following := rule.leave(inside, 0.0)) is not None:
        order.append(following.tenant)
        inside = following
    return "".join(order)


class Admissions(RuleBasedStateMachine):
    """Any sequence of comings, endings, leavings and late ones keeps the laws."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 3
        self.rule = Admission(self.most, most_waiting=5)
        self.now_s = 0.0
        self.line: list[Ticket] = []  # all that wait, in the order of their coming
        self.inside: list[Ticket] = []
        self.came = self.refused = self.left = self.finished = 0

    @rule(tenant=TENANTS, later_s=st.floats(0, 2))
    def come(self, tenant: str, later_s: float) -> None:
        self.now_s += later_s
        self.came += 1
        ticket = Ticket(tenant, self.now_s)
        self.line.append(ticket)
        most = max(Counter(waiting.tenant for waiting in self.line).values())
        refused = self.rule.enter(ticket)
        if refused is not None:
            self.refused += 1
            assert refused.place == "out"
            own = [waiting for waiting in self.line if waiting.tenant == refused.tenant]
            assert refused is own[-1]  # the latest of its tenant, of which no other has more
            assert len(own) == most
            self.line.remove(refused)
        if ticket.place == "in":
            self.line.remove(ticket)
            self.inside.append(ticket)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside))
        self.inside.remove(ticket)
        self.finished += 1
        following = self.rule.leave(ticket, self.now_s)
        if following is None:
            return
        assert following is next(waiting for waiting in self.line if waiting.tenant == following.tenant)
        self.line.remove(following)
        self.inside.append(following)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.line))
        self.line.remove(ticket)
        self.left += 1
        assert self.rule.leave(ticket, self.now_s) is None

    @rule(most=st.integers(1, 4))
    def change_the_bound(self, most: int) -> None:
        self.most = most
        for ticket in self.rule.resize(most, 5, self.now_s):
            self.line.remove(ticket)
            self.inside.append(ticket)

    @rule(ago_s=st.floats(0, 3))
    def be_late(self, ago_s: float) -> None:
        late = self.rule.overdue(self.now_s - ago_s)
        assert set(late) == {ticket for ticket in self.line if ticket.since_s < self.now_s - ago_s}
        self.line = [ticket for ticket in self.line if ticket not in late]
        self.left += len(late)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert (self.rule.in_flight, self.rule.waiting) == (len(self.inside), len(self.line))
        assert self.came == self.refused + self.left + self.finished + self.rule.in_flight + self.rule.waiting
        assert all(ticket.place == "waiting" for ticket in self.line)
        assert all(ticket.place == "in" for ticket in self.inside)

    @invariant()
    def the_bounds_hold_and_no_place_is_left_empty_while_somebody_waits(self) -> None:
        assert self.rule.in_flight <= 4
        assert self.rule.waiting <= 5
        assert self.rule.in_flight >= self.most or not self.rule.waiting


TestAdmissions = Admissions.TestCase


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    rule = Admission(1, 100)
    inside, *_ = entered(rule, "x" + "aaa" + "bb" + "c")
    # One of each in turn; who has none left drops out.
    assert drained(rule, inside) == "abcaba"


def test_a_tenant_that_comes_back_queues_behind_those_that_wait() -> None:
    rule = Admission(1, 100)
    inside, *_ = entered(rule, "xabb")
    first = rule.leave(inside, 0.0)
    assert first is not None
    entered(rule, "a")
    assert (first.tenant, drained(rule, first)) == ("a", "bab")


@given(st.text("abcd", max_size=30), TENANTS, st.text("abcd", max_size=30))
def test_nobody_waits_for_more_than_its_share_of_turns(before: str, tenant: str, after: str) -> None:
    rule = Admission(1, 1000)
    inside, *_ = entered(rule, "x" + before)
    (mine,) = entered(rule, tenant)
    entered(rule, after)
    others = 0
    while True:
        following = rule.leave(inside, 0.0)
        assert following is not None
        if following is mine:
            break
        inside, others = following, others + 1
    present = len(set(before + tenant + after))
    assert others <= (before.count(tenant) + 1) * present - 1


def test_one_that_floods_the_queue_takes_no_place_from_others() -> None:
    rule = Admission(1, 4)
    flood = entered(rule, "a" * 5)
    (other,) = entered(rule, "b")
    assert [ticket.place for ticket in flood] == ["in", "waiting", "waiting", "waiting", "out"]
    assert other.place == "waiting"


def test_without_a_queue_who_does_not_get_in_is_refused() -> None:
    rule = Admission(1, 0)
    assert [ticket.place for ticket in entered(rule, "ab")] == ["in", "out"]


# --- the waiting -------------------------------------------------------------------------------------


def waiting(gate: Gate, tenants: str) -> list[asyncio.Task[Ticket]]:
    return [asyncio.ensure_future(gate.enter(tenant)) for tenant in tenants]


@story
async def test_a_turn_comes_when_one_ends() -> None:
    gate = Gate(Admission(1, 9), 1.0)
    first = await gate.enter("a")
    (second,) = waiting(gate, "a")
    await asyncio.sleep(0)
    assert not second.done()
    gate.leave(first)
    gate.leave(await second)
    assert gate.admission.in_flight == 0


@story
async def test_who_leaves_the_queue_is_taken_out_at_once() -> None:
    gate = Gate(Admission(1, 9), 1.0)
    first = await gate.enter("a")
    second, third = waiting(gate, "aa")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    assert gate.admission.waiting == 1
    gate.leave(first)
    assert (await third).place == "in"


@story
async def test_who_leaves_as_its_turn_comes_gives_it_to_the_next() -> None:
    gate = Gate(Admission(1, 9), 1.0)
    first = await gate.enter("a")
    second, third = waiting(gate, "aa")
    await asyncio.sleep(0)
    gate.leave(first)  # the second is let in, but has not heard of it
    second.cancel()
    assert (await third).place == "in"
    assert gate.admission.in_flight == 1


@story
async def test_who_has_just_left_is_refused_without_a_stir() -> None:
    gate = Gate(Admission(1, 9), 1.0)
    first = await gate.enter("a")
    (second,) = waiting(gate, "a")
    await asyncio.sleep(0)
    second.cancel()
    gate.close()
    await asyncio.gather(second, return_exceptions=True)
    assert second.cancelled()
    gate.leave(first)
    assert (gate.admission.in_flight, gate.admission.waiting) == (0, 0)


@pytest.mark.parametrize("how", ["expire", "close", "flood"])
@story
async def test_those_that_are_refused_are_told_why_and_when_to_ask_again(how: str) -> None:
    gate = Gate(Admission(1, 1), 1.0)
    await gate.enter("a")
    (second,) = waiting(gate, "b")
    await asyncio.sleep(0)
    now_s = asyncio.get_running_loop().time()
    if how == "flood":
        second = asyncio.ensure_future(gate.enter("b"))
    elif how == "expire":
        gate.expire(now_s)
        assert not second.done()
        gate.expire(now_s + 1.5)
    else:
        gate.close()
        with pytest.raises(RefusedError, match="stopping"):
            await gate.enter("c")
    with pytest.raises(RefusedError) as refused:
        await second
    codes = {"expire": "queue_timeout", "close": "stopping", "flood": "queue_full"}
    assert (refused.value.status, refused.value.code) == (503, codes[how])
    assert refused.value.headers == [(b"retry-after", b"1")]
