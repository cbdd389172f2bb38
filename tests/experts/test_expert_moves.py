"""The way from one placement to another: the fewest copies among equals, and where each may come from."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.experts.monitor.demand import suggest
from coterie.experts.monitor.messages import Move
from coterie.experts.monitor.moves import keeping_most, moves, table
from expert_members import server

A, B, C = server("a", "01", experts=4), server("b", "23", experts=4), server("c", "01", experts=4)


def tables(*held):
    """Of servers' experts of one layer, such as "013"."""
    return table([(tuple(map(int, ids)),) for ids in held], 4)


def test_the_same_sets_in_another_order_are_no_move():
    now, then = tables("01", "23", "02"), tables("23", "02", "01")
    assert (keeping_most(now, then) == now).all()


def test_a_set_goes_to_the_server_that_lacks_least_of_it_but_only_among_those_of_its_size():
    assert (keeping_most(tables("01", "23", "013"), tables("03", "01", "023")) == tables("01", "03", "023")).all()


def test_an_expert_comes_from_who_gives_it_up_else_from_who_has_it_else_from_nobody():
    now, then = tables("01", "23", "01"), tables("02", "13", "03")
    # a gives up 1, b takes it; b gives up 2, a takes it; c gives up 1, which nobody takes, and takes 3, which b keeps
    assert moves([A, B, C], now, then) == [
        Move("b", "a", ((2,),)),
        Move("a", "b", ((1,),)),
        Move("b", "c", ((3,),)),
    ]
    assert moves([A, B], tables("01", "1"), tables("01", "3")) == [Move(None, "b", ((3,),))]


def test_each_replica_that_is_given_up_goes_once():
    now, then = tables("0", "0", "1", "1"), tables("1", "1", "0", "0")
    assert [(one.source, one.target) for one in moves([A, B, C, server("d", "0", experts=4)], now, then)] == [
        ("c", "a"), ("d", "b"), ("a", "c"), ("b", "d")
    ]  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_no_other_owners_of_the_same_sets_need_fewer_copies_and_the_moves_lead_there(seed, servers, layers):
    rng = np.random.default_rng(seed)
    now, wanted = rng.random((2, servers, layers, 4)) < 0.5
    then = keeping_most(now, wanted)
    for layer in range(layers):
        sizes = wanted[:, layer].sum(axis=1)
        orders = [list(order) for order in permutations(range(servers)) if (sizes[list(order)] == sizes).all()]
        fewest = min((wanted[order, layer] & ~now[:, layer]).sum() for order in orders)
        assert (then[:, layer] & ~now[:, layer]).sum() == fewest
        assert any((wanted[order, layer] == then[:, layer]).all() for order in orders)
    names = [server(str(number), *["0"] * layers, experts=4) for number in range(servers)]
    reached = now & then
    for move in moves(names, now, then):
        for layer, ids in enumerate(move.experts):
            for expert in ids:
                assert not reached[int(move.target), layer, expert]
                reached[int(move.target), layer, expert] = True
                holders = np.flatnonzero(now[:, layer, expert])
                assert move.source is None if not len(holders) else int(move.source) in holders
    assert (reached == then).all()


def test_a_suggestion_says_what_it_would_take():
    rates = np.zeros((2, 1, 4))
    rates[0, 0, :2] = 40, 40
    rates[1, 0, 2:] = 10, 10
    found = suggest([A, B], rates)  # 0 and 1 apart, 2 and 3 apart: one of each moves, whichever
    assert found.copies == 2
    assert sorted((one.source, one.target) for one in found.moves) == [("a", "b"), ("b", "a")]
    assert found.suggested == pytest.approx(1)
    assert suggest([A, B], np.ones((2, 1, 4))).copies == 0
