"""Where a failed request goes on, and how many may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.edge.http1 import ResponseHead
from coterie.gateway.legs.retry import Budget, LegFailed, Tries, next_leg
from coterie.gateway.legs.upstream import Collected


def answer(status: int) -> Collected:
    collected = Collected(0)
    collected.head = ResponseHead(status, (), chunked=False, length=0, keep_alive=True)
    return collected


@pytest.mark.parametrize(
    ("failure", "split", "leg"),
    [
        (LegFailed("prefill", "p", "connect", sent=False), True, "prefill"),
        (LegFailed("prefill", "p", "closed"), True, "prefill"),
        (LegFailed("prefill", "p", "status"), True, "prefill"),
        (LegFailed("prefill", "p", "nonsense"), True, "prefill"),
        (LegFailed("prefill", "p", "closed", begun=True), False, None),
        (LegFailed("decode", "d", "connect", sent=False), True, "decode"),
        (LegFailed("decode", "d", "status", answer=answer(503)), True, "decode"),
        (LegFailed("decode", "d", "status", answer=answer(502)), True, "prefill"),
        (LegFailed("decode", "d", "status", answer=answer(504)), True, "prefill"),
        (LegFailed("decode", "d", "closed"), True, "prefill"),
        (LegFailed("decode", "d", "timeout"), True, "prefill"),
        (LegFailed("decode", "d", "garbage"), True, "prefill"),
        (LegFailed("decode", "", "too old", sent=False), True, "prefill"),
        (LegFailed("decode", "d", "closed"), False, "decode"),
        (LegFailed("decode", "d", "closed", begun=True), True, None),
    ],
)
def test_the_leg_from_which_a_request_goes_on(failure: LegFailed, split: bool, leg: str | None) -> None:
    assert next_leg(failure, split=split) == leg


def test_a_worker_that_failed_is_not_asked_again_by_the_same_request() -> None:
    tries, failure = Tries(), LegFailed("decode", "d0", "closed")
    tries.note(failure)
    assert not tries.may_go_on(failure, ["d0"], 2)
    assert tries.may_go_on(failure, ["d0", "d1"], 2)
    assert tries.avoid == {"prefill": frozenset(), "decode": {"d0"}}


def test_kv_that_grew_too_old_keeps_nobody_from_being_asked() -> None:
    tries, failure = Tries(), LegFailed("decode", "", "too old", sent=False)
    tries.note(failure)
    assert tries.may_go_on(failure, ["d0"], 2)


def test_there_are_no_more_retries_than_allowed() -> None:
    tries, names = Tries(), ["a", "b", "c", "d"]
    granted = []
    for name in names:
        failure = LegFailed("prefill", name, "closed")
        tries.note(failure)
        granted.append(tries.may_go_on(failure, names, 2))
    assert granted == [True, True, False, False]


def test_all_requests_of_a_lost_worker_are_retried_however_many_they_are() -> None:
    budget = Budget()
    assert all(budget.spend(1000) for _ in range(1000))


def test_a_dead_cluster_gets_a_fifth_more_and_a_few() -> None:
    budget, retries = Budget(), 0
    for _ in range(1000):
        budget.pay()
        retries += budget.spend(1)
    assert retries == pytest.approx(0.2 * 1000 + Budget.FREE + 1, abs=1)


@given(st.lists(st.sampled_from(["pay", "spend"]), max_size=300), st.integers(0, 20))
def test_retries_never_exceed_their_share_and_the_credit(events: list[str], running: int) -> None:
    budget, paid, spent = Budget(), 0, 0
    for event in events:
        if event == "pay":
            budget.pay()
            paid += 1
        else:
            spent += budget.spend(running)
        assert spent <= Budget.SHARE * paid + Budget.FREE + running + 1
