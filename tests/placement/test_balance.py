import json
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import InputError
from coterie.placement import balance, balance_by_node, balance_without_replicas, even_slots
from coterie.placement.replication import replicate
from placement_cases import CASES, case, place

PEER = json.loads((Path(__file__).parents[1] / "fixtures" / "eplb.json").read_text())


@st.composite
def loads_and_slots(draw):
    """A load and slots of ranks, unequal, that can hold it."""
    experts = draw(st.integers(1, 12))
    slots = draw(st.lists(st.integers(1, experts), min_size=1, max_size=6))
    while sum(slots) < experts:
        slots.append(min(experts, experts - sum(slots)))
    load = draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    return np.array([load, load[::-1]]), slots


@given(loads_and_slots())
@settings(max_examples=150, deadline=None)
def test_every_rank_is_full_and_no_rank_holds_an_expert_twice(case):
    load, slots = case
    placement = balance(load, slots)
    for layer, rank in product(range(2), range(len(slots))):
        held = placement.held(layer, rank)
        assert len(held) == len(set(held)) == slots[rank]
    assert (placement.replicas >= 1).all()
    np.testing.assert_allclose(placement.loads(load).sum(axis=1), load.sum(axis=1))


@given(loads_and_slots())
@settings(max_examples=60, deadline=None)
def test_a_layer_is_placed_alike_whatever_the_other_layers_and_the_unit(case):
    load, slots = case
    alone = balance(load[:1] * 4, slots)
    np.testing.assert_array_equal(balance(load, slots).experts[0], alone.experts[0])


def numbers_of_replicas(experts, slots):
    """All that fill the slots without doubling, by trying every set of experts on each rank."""
    ranks = [combinations(range(experts), size) for size in slots]
    counts = {tuple(sum(e in rank for rank in held) for e in range(experts)) for held in product(*ranks)}
    return [some for some in counts if min(some) > 0]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_no_other_numbers_of_replicas_have_a_smaller_largest_load_per_replica(load, data):
    experts = len(load)
    slots = data.draw(st.lists(st.integers(1, experts), min_size=2, max_size=3).filter(lambda s: sum(s) >= experts))
    possible = numbers_of_replicas(experts, slots)
    replicas = replicate(load, slots)
    assert tuple(replicas) in possible
    best = min(max(one / count for one, count in zip(load, some, strict=True)) for some in possible)
    assert max(one / count for one, count in zip(load, replicas, strict=True)) == pytest.approx(best)


@given(st.lists(st.integers(0, 20), min_size=4, max_size=7), st.integers(2, 3))
@settings(max_examples=40, deadline=None)
def test_without_replicas_no_single_swap_would_help(load, ranks):
    placement = balance_without_replicas(np.array([load]), ranks)
    rank_of = placement.rank_of_expert()[0]
    busiest = np.bincount(rank_of, load).max()
    for one, other in combinations(range(len(load)), 2):
        swapped = rank_of.copy()
        swapped[[one, other]] = swapped[[other, one]]
        assert np.bincount(swapped, load).max() >= busiest - 1e-9 or (np.bincount(rank_of, load) == busiest).sum() > 1


def test_six_experts_on_two_ranks_are_spread_as_well_as_can_be():
    # 9 + 4 + 2 = 15 and 7 + 5 + 3 = 15
    placement = balance_without_replicas(np.array([[9, 7, 5, 4, 3, 2]]), 2)
    assert placement.loads(np.array([[9, 7, 5, 4, 3, 2]])).tolist() == [[15, 15]]
    assert {placement.held(0, 0), placement.held(0, 1)} == {(0, 3, 5), (1, 2, 4)}


def test_a_busy_expert_is_shared_unevenly_where_that_evens_the_ranks():
    # expert 0 on both ranks, 1 on one, 2 on the other: 20 - 4 = 16 in all, 8 each, so expert 0 gives 3 and 7
    load = np.array([[10, 5, 1]])
    placement = balance(load, [2, 2])
    assert placement.loads(load).tolist() == [[8, 8]]
    assert sorted(placement.shares[0][placement.experts[0] == 0].tolist()) == pytest.approx([0.3, 0.7])


def test_groups_stay_whole_and_each_node_has_as_many():
    load = np.random.default_rng(0).gamma(1, 100, (3, 32))
    placement = balance_by_node(load, [9] * 4, groups=8, nodes=2)
    for layer in range(3):
        nodes_of_group = [
            {rank // 2 for expert in range(4 * group, 4 * group + 4) for rank in placement.owners(layer, expert)}
            for group in range(8)
        ]
        assert sorted(node for (node,) in nodes_of_group) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_on_no_case_is_the_busiest_rank_busier_than_where_the_public_eplb_places_experts():
    worse = [
        seed
        for seed in range(0, CASES, 4)  # bench/eplb.py takes all
        if (place(case(seed)).imbalance(case(seed).load) > np.array(PEER["imbalance"][seed]) + 1e-6).any()
    ]
    assert len(PEER["imbalance"]) == CASES
    assert worse == []


@pytest.mark.parametrize("load", [(1e15, 1e-3, 5), (1e300, 1, 1), (1e6, 1e-12, 1e-12)])
def test_a_load_that_is_nothing_beside_the_others_is_placed_too(load):
    placement = balance(np.array([load]), [3, 3])
    assert placement.replicas.tolist() == [[2, 2, 2]]
    assert placement.imbalance(np.array([load])).tolist() == [pytest.approx(1)]


def test_a_layer_without_load_is_placed_too():
    placement = balance(np.zeros((1, 4)), [3, 3])
    assert placement.replicas.tolist() == [[2, 2, 1, 1]]
    assert placement.imbalance(np.zeros((1, 4))).tolist() == [1]


@pytest.mark.parametrize(
    ("load", "slots", "message"),
    [
        ([[1, 2]], [1], "slots \\[1\\] for 2 experts"),
        ([[1, 2]], [3], "each rank needs from 1 to 2"),
        ([[1, 2]], [], "slots \\[\\] for 2 experts"),
        ([[1, 2]], [2, 0], "slots \\[2, 0\\]"),
        ([[1, -2]], [2], "load -2 of expert 1 in layer 0"),
        ([[1, 2], [1, np.nan]], [2], "load nan of expert 1 in layer 1"),
        ([1, 2], [2], "load of shape \\(2,\\)"),
    ],
)
def test_wrong_arguments_are_refused(load, slots, message):
    with pytest.raises(InputError, match=message):
        balance(np.array(load), slots)


def test_nodes_that_do_not_divide_the_groups_are_refused():
    with pytest.raises(InputError, match="in 3 groups, 4 ranks on 2 nodes"):
        balance_by_node(np.ones((1, 6)), [2] * 4, groups=3, nodes=2)


def test_slots_are_divided_evenly():
    assert even_slots(10, 4) == (3, 3, 2, 2)
    with pytest.raises(InputError, match="3 slots for 4 ranks"):
        even_slots(3, 4)
