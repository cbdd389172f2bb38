"""What requests use, shared by processes: sums are right when all is quiet, whole at any time, and without the dead."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import ExpertCounts, ModelGeometry, RouteRequest, WorkerState
from coterie.routing import Ledger, Marginal, route
from coterie.routing.shared_batches import SharedBatches
from coterie.routing.shared_load import Board

GEOMETRY = ModelGeometry(layers=2, experts=4, top_k=1)
GROUPS = ["a", "b"]


@pytest.fixture
def board():
    return Board(bytearray(Board.size(3)), 3)


@pytest.fixture
def seats(board, tmp_path):
    made = []

    def sit(process, groups=GROUPS, geometry=GEOMETRY, **options):
        made.append(SharedBatches(board.announcements, process, groups, geometry, folder=str(tmp_path), **options))
        return made[-1]

    yield sit
    for one in made:
        one.close()
    assert list(tmp_path.iterdir()) == []


def row(seed):
    return np.random.default_rng(seed).integers(-100, 0, 8).astype(np.int32)


def grown(batches):
    return {group: (requests, sums.tolist()) for group, requests, sums in batches.changed()}


def test_what_others_requests_use_is_told_once(seats):
    one, other, third = (seats(process) for process in range(3))
    one.show(0, row(1), +1)
    third.show(0, row(2), +1)
    third.show(1, row(3), +1)
    assert grown(other) == {0: (2, (row(1) + row(2)).tolist()), 1: (1, row(3).tolist())}
    assert grown(other) == {}
    one.show(0, row(1), -1)
    assert grown(other) == {0: (-1, (-row(1)).tolist())}
    assert grown(one) == {0: (1, row(2).tolist()), 1: (1, row(3).tolist())}


def test_groups_are_known_by_their_identity_and_files_of_another_model_are_left_out(seats):
    one = seats(0, ["decode-0"], identity={"decode-0": "http://x"}.__getitem__)
    seats(1, geometry=ModelGeometry(layers=1, experts=4, top_k=1)).show(0, row(1)[:4], +1)
    other = seats(2, identity={"a": "http://y", "b": "http://x"}.__getitem__)
    one.show(0, row(1), +1)
    other.show(0, row(2), +1)
    assert grown(other) == {1: (1, row(1).tolist())}
    assert grown(one) == {}


def test_the_dead_and_those_who_begin_anew_take_back_what_they_had(board, seats):
    one, other = seats(0), seats(1)
    one.show(0, row(1), +1)
    assert grown(other) == {0: (1, row(1).tolist())}
    board.clear(0)
    assert grown(other) == {0: (-1, (-row(1)).tolist())}
    again = seats(0)
    again.show(1, row(2), +1)
    assert grown(other) == {1: (1, row(2).tolist())}
    seats(0)
    assert grown(other) == {1: (-1, (-row(2)).tolist())}


def test_a_group_that_its_writer_left_in_the_middle_of_a_change_waits_until_that_is_dead(board, seats):
    one, other = seats(0), seats(1)
    one.show(0, row(1), +1)
    one.show(1, row(2), +1)
    assert set(grown(other)) == {0, 1}
    one._mine.versions[0] += 1
    one._mine.sums[0, :3] += 1
    one.show(1, row(2), -1)
    assert grown(other) == {1: (-1, (-row(2)).tolist())}
    board.clear(0)
    assert grown(other) == {0: (-1, (-row(1)).tolist())}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 9), st.booleans()), max_size=40))
def test_what_is_taken_in_adds_up_to_what_the_others_hold(tmp_path_factory, steps):
    folder = str(tmp_path_factory.getbasetemp())
    shared = Board(bytearray(Board.size(3)), 3)
    views = [SharedBatches(shared.announcements, i, GROUPS, GEOMETRY, folder=folder) for i in range(3)]
    held, seen = [{0: [], 1: []} for _ in views], np.zeros((3, 2, 8), np.int64)
    for process, group, seed, look in steps:
        mine = held[process][group]
        if seed < 5 or not mine:
            mine.append(seed)
            views[process].show(group, row(seed), +1)
        else:
            views[process].show(group, row(mine.pop()), -1)
        for at, _, sums in views[process].changed() if look else ():
            seen[process, at] += sums
    for process, view in enumerate(views):
        for at, _, sums in view.changed():
            seen[process, at] += sums
        for group in range(2):
            others = [row(seed) for i, one in enumerate(held) if i != process for seed in one[group]]
            assert seen[process, group].tolist() == sum(others, np.zeros(8, np.int64)).tolist()
    for view in views:
        view.close()


def test_marginal_of_two_processes_decides_as_that_of_one_once_it_has_taken_in(board, seats):
    targets = [WorkerState(name, name) for name in GROUPS]
    policies = [Marginal(targets) for _ in range(3)]
    ledgers = [Ledger(targets, others=board.row(1, i)) for i in range(2)] + [Ledger(targets)]
    for i, (policy, ledger) in enumerate(zip(policies, ledgers, strict=True)):
        if i < 2:
            policy.share(lambda groups, geometry, i=i: seats(i, groups, geometry))
        ledger.follow(policy)
    rng = np.random.default_rng(0)
    requests = [asked(rng) for _ in range(12)]
    for i, request in enumerate(requests):
        for ledger in (ledgers[i % 2], ledgers[2]):
            ledger.lease(GROUPS[i % 3 % 2], request)
    for policy, ledger in zip(policies, ledgers, strict=True):
        policy.due(ledger.states(), 0.0)
    active = [policy._pool.batches.active for policy in policies]
    assert active[0] == active[1] == active[2]
    states = [[(state.requests, state.tokens) for state in ledger.states()] for ledger in ledgers]
    assert states[0] == states[1] == states[2]
    for request in requests:
        chosen = {route(p, request, ledger.states(), rng).worker for p, ledger in zip(policies, ledgers, strict=True)}
        assert len(chosen) == 1


def asked(rng):
    counts = np.zeros((2, 4), np.uint16)
    for layer in counts:
        layer[rng.integers(4)] = 3
    return RouteRequest("r", 3, 5, counts=ExpertCounts(GEOMETRY, counts, tokens=3, covered=3))


WRITER = """
import mmap, sys
import numpy as np
from coterie.core import ModelGeometry
from coterie.routing.shared_batches import SharedBatches
from coterie.routing.shared_load import Board
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
geometry = ModelGeometry(48, 128, 8)
batches = SharedBatches(Board(memory, 2).announcements, 0, ["a"], geometry, folder=sys.argv[2])
print("ready", flush=True)
for i in range(10**9):
    batches.show(0, np.full(48 * 128, i % 1000 + 1, np.int32), +1)  # always the same everywhere
"""


def test_sums_read_while_they_change_are_whole_and_gone_with_their_writer(tmp_path):
    file = tmp_path / "board"
    file.write_bytes(bytes(Board.size(2)))
    with file.open("r+b") as opened:
        shared = Board(mmap.mmap(opened.fileno(), 0), 2)
    geometry = ModelGeometry(48, 128, 8)
    mine = SharedBatches(shared.announcements, 1, ["a"], geometry, folder=str(tmp_path))
    arguments = [sys.executable, "-c", WRITER, str(file), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        total, reads = np.zeros(48 * 128, np.int64), 0
        while reads < 60:
            for _, _, sums in mine.changed():
                total += sums
                reads += 1
                assert (total == total[0]).all()
        writer.kill()
    shared.clear(0)
    for _, _, sums in mine.changed():
        total += sums
    assert not total.any()
    mine.close()
