"""Load that processes share: every view is the sum of all rows, whole, and the dead hold nothing."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import RouteRequest, WorkerState
from coterie.errors import InputError
from coterie.routing import Lease, Ledger, Load
from coterie.routing.shared_load import MOST_WORKERS, Board

NAMES = ["a", "b", "c"]
TARGETS = [WorkerState(name, name) for name in NAMES]


def board(rows: int = 2, sessions: int = 0) -> Board:
    return Board(bytearray(Board.size(rows, sessions)), rows, sessions)


def ledgers(shared: Board, count: int) -> list[Ledger]:
    return [ledger_of(shared, row) for row in range(count)]


def ledger_of(shared: Board, row: int) -> Ledger:
    return Ledger(TARGETS, others=shared.row(1, row))


def request(prompt_tokens: int = 10, output_tokens: int = 5, session: str | None = None) -> RouteRequest:
    return RouteRequest("r", prompt_tokens=prompt_tokens, output_tokens=output_tokens, session=session)


def held(ledger: Ledger) -> dict[str, tuple[int, int]]:
    return {state.name: (state.requests, state.tokens) for state in ledger.states()}


def test_each_ledger_sees_what_all_hold_and_owns_what_it_leased():
    one, other = ledgers(board(), 2)
    lease = one.lease("a", request())
    other.lease("a", request(100, 0))
    assert held(one) == held(other) == {"a": (2, 115), "b": (0, 0), "c": (0, 0)}
    assert one.own()["a"] == Load(1, 15, 1)
    lease.release()
    assert held(one) == held(other) == {"a": (1, 100), "b": (0, 0), "c": (0, 0)}
    assert one.totals()["a"].released == 1
    assert other.totals()["a"].released == 0


def test_assignments_are_numbered_on_from_the_greatest_number_seen():
    one, other = ledgers(board(), 2)
    for worker in "aab":
        one.lease(worker, request())
    assert [state.assigned for state in other.states()] == [2, 3, 0]
    assert other.lease("c", request()).sequence == 4
    assert [state.assigned for state in one.states()] == [2, 3, 4]


def test_the_roles_of_a_process_do_not_mix():
    shared = board()
    prefill, decode = (Ledger(TARGETS, others=shared.row(role, 0)) for role in (0, 1))
    prefill.lease("a", request())
    seen = Ledger(TARGETS, others=shared.row(1, 1))
    assert held(decode) == held(seen) == {"a": (0, 0), "b": (0, 0), "c": (0, 0)}


def test_workers_are_known_by_their_identity_whatever_their_names_and_order():
    shared = board()
    urls = {"decode-0": "http://x", "decode-1": "http://y"}
    names = [WorkerState(name, name) for name in urls]
    one = Ledger(names, others=shared.row(1, 0, urls.__getitem__))
    swapped = {"decode-0": "http://y", "decode-1": "http://z"}
    other = Ledger(names, others=shared.row(1, 1, swapped.__getitem__))
    one.lease("decode-1", request())
    assert held(other) == {"decode-0": (1, 15), "decode-1": (0, 0)}


def test_a_process_that_attaches_anew_keeps_the_slots_it_had():
    shared = board()
    one, other = shared.row(1, 0), shared.row(1, 1)
    one.attach(["a", "b"])
    other.attach(["b", "a"])
    one.show(1, Load(3, 30, 1))
    assert list(other.changed()) == [(0, Load(3, 30, 1))]
    one.attach(["b", "c"])
    one.show(1, Load(1, 10, 2))
    assert list(other.changed()) == []  # b is as it was, c is not its worker
    other.attach(["c", "b"])
    assert list(other.changed()) == [(0, Load(1, 10, 2)), (1, Load(3, 30, 1))]


def test_more_workers_than_a_row_has_places_for_are_refused_before_any_is_entered():
    shared = board()
    row = shared.row(1, 0)
    row.attach([str(i) for i in range(MOST_WORKERS)])
    with pytest.raises(InputError, match="more than 1023 workers"):
        row.attach(["one more"])
    row.show(MOST_WORKERS - 1, Load(1, 1, 1))
    other = shared.row(1, 1)
    other.attach([str(MOST_WORKERS - 1), "one more"])
    assert list(other.changed()) == [(0, Load(1, 1, 1))]


def test_the_row_of_the_dead_holds_nothing_and_is_free_for_another_process():
    shared = board()
    one, other = ledgers(shared, 2)
    one.lease("a", request())
    assert held(other)["a"] == (1, 15)
    shared.clear(0)
    assert held(other)["a"] == (0, 0)
    again = Ledger([TARGETS[2], TARGETS[0]], others=shared.row(1, 0))  # in another order: other slots
    again.lease("c", request())
    assert held(other) == {"a": (0, 0), "b": (0, 0), "c": (1, 15)}


def test_tokens_beyond_the_word_never_spill_into_requests():
    one, other = ledgers(board(), 2)
    one.lease("a", request(1 << 50, 1 << 50))
    assert held(other)["a"] == (1, (1 << 34) - 1)
    assert one.own()["a"].tokens == 1 << 51


def test_conversations_are_remembered_by_all_and_forgotten_where_none_are_kept():
    one, other = ledgers(board(sessions=100), 2)
    one.lease("b", request(session="s"))
    assert other.recall(request(session="s")).holder == "b"
    other.lease("c", request(session="s"))
    assert one.recall(request(session="s")).holder == "c"
    assert one.recall(request(session="t")).holder is None
    assert one.recall(request()).holder is None
    none, _ = ledgers(board(sessions=0), 2)
    none.lease("b", request(session="s"))
    assert none.recall(request(session="s")).holder is None


def test_a_conversation_of_a_worker_that_is_not_there_is_not_recalled():
    shared = board(sessions=100)
    one = Ledger(TARGETS, others=shared.row(1, 0))
    one.lease("c", request(session="s"))
    two = Ledger(TARGETS[:2], others=shared.row(1, 1))
    assert two.recall(request(session="s")).holder is None


@pytest.mark.parametrize(("rows", "sessions"), [(0, 0), (65, 0), (1, -1)])
def test_a_board_out_of_range_is_refused(rows, sessions):
    with pytest.raises(InputError, match="board"):
        Board.size(rows, sessions)


steps = st.lists(
    st.tuples(st.sampled_from(["lease", "release", "die"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 99)),
    max_size=60,
)


@settings(deadline=None, max_examples=50)
@given(steps)
def test_every_view_is_the_sum_of_what_is_held_after_each_step(steps):
    shared = board(3)
    views, leases = ledgers(shared, 3), [[] for _ in range(3)]
    for kind, row, worker, tokens in steps:
        if kind == "lease":
            leases[row].append(views[row].lease(NAMES[worker], request(tokens)))
        elif kind == "release" and leases[row]:
            leases[row].pop(tokens % len(leases[row])).release()
        elif kind == "die":
            shared.clear(row)
            views[row], leases[row] = ledger_of(shared, row), []
        expected = summed([lease for one in leases for lease in one])
        assert all(held(view) == expected for view in views)


def summed(leases: list[Lease]) -> dict[str, tuple[int, int]]:
    requests: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for lease in leases:
        requests[lease.worker] += 1
        tokens[lease.worker] += lease.request.prompt_tokens + lease.request.output_tokens
    return {name: (requests[name], tokens[name]) for name in NAMES}


# --- real processes ---

CHILD = """
import mmap, random, sys
from coterie.core import RouteRequest, WorkerState
from coterie.routing import Ledger
from coterie.routing.shared_load import Board
path, rows, row, seed = sys.argv[1], *map(int, sys.argv[2:])
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
ledger = Ledger([WorkerState(name, name) for name in "abc"], others=Board(memory, rows).row(1, row))
rng, leases = random.Random(seed), []
def change():
    # Requests and tokens always tell the same number, so half of a change would show.
    if leases and rng.random() < 0.5:
        leases.pop(rng.randrange(len(leases))).release()
    else:
        leases.append(ledger.lease(rng.choice("abc"), RouteRequest("r", prompt_tokens=1000)))
    assert all(state.tokens == 1000 * state.requests for state in ledger.states()), ledger.states()
print("ready", flush=True)
for line in sys.stdin:
    if line == "forever\\n":
        while True:
            change()
    for _ in range(int(line)):
        change()
    print(*(load.requests for load in ledger.own().values()), flush=True)
    sys.stdin.readline()
    print(*(state.requests for state in ledger.states()), flush=True)
"""


class Child:
    def __init__(self, path: Path, rows: int, row: int, seed: int) -> None:
        arguments = [str(path), str(rows), str(row), str(seed)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate()


def test_views_of_real_processes_are_whole_and_agree_when_all_is_quiet_whoever_is_killed(tmp_path):
    rows = 3
    file = tmp_path / "board"
    file.write_bytes(bytes(Board.size(rows)))
    with file.open("r+b") as opened:
        shared = Board(mmap.mmap(opened.fileno(), 0), rows)
    mine = Ledger(TARGETS, others=shared.row(1, 2))
    mine.lease("a", request(1000, 0))
    children = [Child(file, rows, row, seed=row) for row in range(2)]
    try:
        assert [child.hear() for child in children] == [["ready"], ["ready"]]
        agree(children, mine)
        for seed in range(2):
            kill_at_work(children[0], mine, after=1000 * seed)
            shared.clear(0)
            children[0] = Child(file, rows, 0, seed)
            assert children[0].hear() == ["ready"]
            agree(children, mine)
    finally:
        for child in children:
            child.end()
    shared.clear(0)
    shared.clear(1)
    assert held(mine) == {"a": (1, 1000), "b": (0, 0), "c": (0, 0)}


def agree(children: list[Child], mine: Ledger) -> None:
    """Let all work at once; then all are quiet."""
    for child in children:
        child.say("1000")
    own = [[int(number) for number in child.hear()] for child in children]
    expected = [a + b + c for a, b, c in zip(*own, [1, 0, 0], strict=True)]
    assert [state.requests for state in mine.states()] == expected
    for child in children:
        child.say("")
        assert [int(number) for number in child.hear()] == expected


def kill_at_work(child: Child, mine: Ledger, after: int) -> None:
    child.say("forever")
    for _ in range(after):
        assert all(state.tokens == 1000 * state.requests for state in mine.states())
    child.end()
