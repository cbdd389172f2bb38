from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coterie.core import RouteRequest, WorkerState
from coterie.routing import PREFIX_BYTES, Prefix, route

RNG = np.random.default_rng(0)
FOUR = tuple(WorkerState(name, name) for name in ("p0", "p1", "p2", "p3"))
KEYS = [f"prompt {i}".encode() for i in range(2000)]


def choose(prefix, workers=FOUR, targets=FOUR):
    return Prefix(targets).choose(RouteRequest("r", prefix=prefix), workers, RNG)


def owners(workers):
    policy = Prefix(FOUR)
    return [route(policy, RouteRequest("r", prefix=key), workers, RNG).worker for key in KEYS]


def test_the_same_prefix_goes_to_the_same_worker():
    assert len({choose(b"You are a helpful assistant.").worker for _ in range(5)}) == 1


def test_only_the_first_bytes_count():
    head = b"x" * PREFIX_BYTES
    assert choose(head + b"one").worker == choose(head + b"two").worker


def test_keys_spread_evenly():
    shares = Counter(owners(FOUR))
    assert all(350 < shares[worker.name] < 650 for worker in FOUR)  # 500 on average


def test_a_lost_worker_moves_only_its_own_keys_and_to_all_others():
    before = owners(FOUR)
    after = owners([replace(FOUR[0], available=False), *FOUR[1:]])
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) == before.count("p0")
    assert set(moved) == {"p1", "p2", "p3"}


def test_the_order_of_workers_does_not_matter():
    assert [choose(key, FOUR[::-1], FOUR[::-1]).worker for key in KEYS[:50]] == owners(FOUR)[:50]


def test_an_owner_at_the_bound_keeps_its_key_and_above_it_passes_it_on():
    # 4 workers, sum 7: bound 1.25 * 8 / 4 = 2.5
    owner = choose(b"key").worker
    others = [worker for worker in FOUR if worker.name != owner]

    def loaded(own, *rest):
        states = [WorkerState(owner, owner, requests=own)]
        return states + [replace(worker, requests=n) for worker, n in zip(others, rest, strict=True)]

    assert (choose(b"key", loaded(2, 2, 2, 1)).worker, choose(b"key", loaded(2, 2, 2, 1)).reason) == (owner, "prefix")
    spilled = choose(b"key", loaded(3, 2, 1, 1))
    assert spilled.worker != owner
    assert spilled.reason == "prefix: owner is above the bound"
    # the next on the ring takes it whichever of the others is the least loaded
    assert {choose(b"key", loaded(3, *rest)).worker for rest in [(2, 1, 1), (1, 2, 1), (1, 1, 2)]} == {spilled.worker}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.binary(min_size=1, max_size=8))
def test_the_chosen_worker_is_never_above_the_bound(requests, key):
    workers = [replace(worker, requests=n) for worker, n in zip(FOUR, requests, strict=False)]
    chosen = choose(key, workers).worker
    load = {worker.name: worker.requests for worker in workers}[chosen]
    assert load <= 1.25 * (sum(requests) + 1) / len(requests)


def test_an_empty_prefix_goes_to_the_least_loaded():
    workers = [replace(worker, requests=n) for worker, n in zip(FOUR, (3, 2, 0, 1), strict=True)]
    decision = choose(b"", workers)
    assert (decision.worker, decision.reason) == ("p2", "load only: no prefix")


@pytest.mark.parametrize("only", FOUR)
def test_a_single_available_worker_takes_everything(only):
    assert {choose(key, [replace(only, requests=100)]).worker for key in KEYS[:20]} == {only.name}
