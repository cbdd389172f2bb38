"""What counts of what other gateways said: the last word of each that was heard of lately, in whatever order."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import ModelGeometry, RouteRequest, WorkerState
from coterie.counting import KERNEL
from coterie.errors import InputError, WireError
from coterie.gateway.peers.heard import DECODE, Heard, Own
from coterie.gateway.peers.message import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Figures,
    figures_of,
    message_of,
    read_message,
    write_message,
)
from coterie.gateway.peers.pace import Pace
from coterie.routing import Ledger, Load
from coterie.routing.marginal_batches import LEAST_IN_ROW
from coterie.routing.shared_batches import SharedBatches
from coterie.routing.shared_load import MOST_WORKERS, Board, key_of

NAMES = ["a", "b", "c"]
TARGETS = [WorkerState(name, name) for name in NAMES]
KEYS = [key_of(name) for name in NAMES]
GEOMETRY = ModelGeometry(layers=2, experts=4, top_k=1)
SHAPE = (2, 4)
TIMEOUT_S = 5.0
ME, ONE, OTHER, THIRD = (digit * 32 for digit in "0123")


class Gateway:
    """What a gateway of one process has of the exchange."""

    def __init__(self, folder, rows=4):
        self.board = Board(bytearray(Board.size(rows)), rows)
        self.ledger = Ledger(TARGETS, others=self.board.row(DECODE, 0))
        self.batches = SharedBatches(self.board.announcements, 0, NAMES, GEOMETRY, folder=str(folder))
        self.own = Own(self.board, 1, str(folder))
        self.heard = Heard(self.own, ME, self.board, range(1, rows), TIMEOUT_S, str(folder))

    def held(self):
        return [(state.requests, state.tokens) for state in self.ledger.states()]

    def close(self):
        for identity in list(self.heard.views):
            self.heard.forget(identity)
        self.batches.close()


@pytest.fixture
def gateway(tmp_path):
    made = Gateway(tmp_path)
    made.own.figures()  # the geometry of the model is known
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def said(loads, identity=ONE, sequence=1, batches=None, shape=None, **named):
    """A message as it arrives: through its bytes."""
    decode = {key: Load(requests, 10 * requests) for key, requests in zip(KEYS, loads, strict=False)}
    figures = Figures({}, decode, SHAPE if batches else shape, batches or {})
    return read_message(write_message(message_of(figures, identity, sequence, **named)))


def row(seed):
    return np.random.default_rng(seed).integers(-100, 0, 8).astype(np.int64)


def test_the_view_is_what_is_held_here_and_what_each_other_gateway_said_last(gateway):
    gateway.ledger.lease("a", RouteRequest("r", 7, 1))
    assert gateway.heard.take(said([1, 2, 0]), 0.0)
    assert gateway.heard.take(said([0, 0, 5], OTHER), 0.0)
    assert gateway.held() == [(2, 18), (2, 20), (5, 50)]
    assert gateway.heard.take(said([0, 1, 0], sequence=2), 1.0)
    assert gateway.held() == [(1, 8), (1, 10), (5, 50)]
    assert gateway.ledger.own()["a"] == Load(1, 8, 1)


def test_a_message_that_was_overtaken_or_is_the_gateways_own_does_not_count(gateway):
    assert gateway.heard.take(said([1, 0, 0], sequence=7), 0.0)
    assert not gateway.heard.take(said([9, 9, 9], sequence=7), 0.0)
    assert not gateway.heard.take(said([9, 9, 9], sequence=6), 0.0)
    assert not gateway.heard.take(said([9, 9, 9], ME, sequence=8), 0.0)
    assert gateway.held()[0] == (1, 10)


def test_who_is_silent_for_too_long_holds_nothing_any_more_and_may_come_back(gateway):
    gateway.heard.take(said([1, 0, 0]), 0.0)
    gateway.heard.take(said([2, 0, 0], OTHER), 3.0)
    assert gateway.heard.expire(TIMEOUT_S) == []
    assert [view.identity for view in gateway.heard.expire(TIMEOUT_S + 0.1)] == [ONE]
    assert gateway.held()[0] == (2, 20)
    assert gateway.heard.take(said([4, 0, 0], sequence=2), 9.0)
    assert gateway.held()[0] == (6, 60)


def test_who_takes_leave_holds_nothing_any_more(gateway):
    gateway.heard.take(said([1, 0, 0]), 0.0)
    assert gateway.heard.take(said([1, 0, 0], sequence=2, leaving=True), 0.0)
    assert gateway.held()[0] == (0, 0)
    assert gateway.heard.views == {}


def test_workers_that_are_not_here_are_left_alone_and_counted(gateway):
    decode = {KEYS[0]: Load(1, 1), key_of("x"): Load(5, 5), key_of("y"): Load(5, 5)}
    gateway.heard.take(message_of(Figures({}, decode, None, {}), ONE, 1), 0.0)
    assert gateway.held() == [(1, 1), (0, 0), (0, 0)]
    assert gateway.heard.views[ONE].unknown_workers == 2


def test_what_requests_use_elsewhere_is_told_as_if_by_a_process_of_this_host(gateway):
    gateway.batches.show(0, row(1).astype(np.int32), +1)
    gateway.heard.take(said([2, 1, 0], batches={KEYS[0]: (2, row(2)), KEYS[1]: (1, row(3))}), 0.0)
    assert grown(gateway.batches) == {0: (2, row(2).tolist()), 1: (1, row(3).tolist())}
    gateway.heard.take(said([1, 1, 0], sequence=2, batches={KEYS[0]: (1, row(4)), KEYS[1]: (1, row(3))}), 0.0)
    assert grown(gateway.batches) == {0: (-1, (row(4) - row(2)).tolist())}
    gateway.heard.take(said([1, 0, 0], sequence=3, batches={KEYS[0]: (1, row(4))}), 0.0)
    assert grown(gateway.batches) == {1: (-1, (-row(3)).tolist())}
    gateway.heard.expire(TIMEOUT_S + 1)
    assert grown(gateway.batches) == {0: (-1, (-row(4)).tolist())}


def grown(batches):
    return {group: (requests, sums.tolist()) for group, requests, sums in batches.changed()}


def test_what_a_gateway_says_is_what_all_its_processes_hold(tmp_path):
    board = Board(bytearray(Board.size(3)), 3)
    ledgers = [Ledger(TARGETS, others=board.row(DECODE, process)) for process in range(2)]
    made = [SharedBatches(board.announcements, i, NAMES, GEOMETRY, folder=str(tmp_path)) for i in range(2)]
    own = Own(board, 2, str(tmp_path))
    before = own.mark()
    for i, (ledger, batches) in enumerate(zip(ledgers, made, strict=True)):
        ledger.lease("b", RouteRequest("r", 3, 4))
        batches.show(1, row(i).astype(np.int32), +1)
    board.writer(DECODE, 2).replace({KEYS[1]: Load(50, 50)})  # of another gateway: not for us to tell
    figures = own.figures()
    assert figures.decode == {KEYS[0]: Load(), KEYS[1]: Load(2, 14), KEYS[2]: Load()}
    assert {key: (n, sums.tolist()) for key, (n, sums) in figures.batches.items()} == {
        KEYS[1]: (2, (row(0) + row(1)).tolist())
    }
    assert own.mark() != before
    for batches in made:
        batches.close()


def test_what_a_process_is_just_changing_is_told_as_it_was_before(gateway):
    """So it stays if the process was killed amid the change, until its row is cleared."""
    gateway.batches.show(0, row(1).astype(np.int32), +1)
    before = gateway.own.figures().batches[KEYS[0]]
    gateway.batches._mine.versions[0] += 1
    gateway.batches._mine.sums[0] -= 5
    requests, sums = gateway.own.figures().batches[KEYS[0]]
    assert (requests, sums.tolist()) == (before[0], before[1].tolist())
    gateway.board.clear(0)
    assert gateway.own.figures().batches == {}


EVENTS = st.lists(
    st.tuples(st.sampled_from("012"), st.integers(1, 6), st.integers(0, 9), st.floats(0, 3)), min_size=1, max_size=40
)


@settings(deadline=None, max_examples=60)
@given(EVENTS)
def test_whatever_is_lost_late_or_doubled_each_gateway_counts_by_its_last_word(tmp_path_factory, events):
    """The oracle keeps all that came, and looks for the greatest number of each that has not been silent."""
    gateway = Gateway(tmp_path_factory.getbasetemp())
    words: dict[str, tuple[int, int, float]] = {}  # number, requests, when
    now_s = 0.0
    for gateway_, sequence, requests, later_s in events:
        now_s += later_s
        words = {identity: word for identity, word in words.items() if now_s - word[2] <= TIMEOUT_S}
        gateway.heard.expire(now_s)
        identity = gateway_ * 32
        counts = identity != ME and (identity not in words or words[identity][0] < sequence)
        assert gateway.heard.take(said([requests], identity, sequence), now_s) is counts
        if counts:
            words[identity] = (sequence, requests, now_s)
        assert gateway.held()[0][0] == sum(requests for _, requests, _ in words.values())
    gateway.close()


def test_a_row_is_used_again_and_one_gateway_too_many_is_refused(gateway):
    for identity in (ONE, OTHER, THIRD):
        gateway.heard.take(said([1], identity), 0.0)
    with pytest.raises(InputError, match="hears of 3 others already; give every gateway all others by --peer"):
        gateway.heard.take(said([9], "4" * 32), 0.0)
    gateway.heard.forget(OTHER)
    gateway.heard.take(said([5], "4" * 32), 0.0)
    assert gateway.held()[0] == (7, 70)


def test_a_gateway_that_keeps_starting_again_gets_the_row_of_what_it_was_before(gateway):
    """Of three rows; a third of the time-out is as long as messages are apart at most."""
    for life in range(9):
        gateway.heard.take(said([1], f"{life:032x}".replace("0", "a")), life * TIMEOUT_S / 8)
    assert gateway.held()[0] == (3, 30)
    assert len(gateway.heard.views) == 3


def test_a_gateway_may_come_to_have_more_workers_in_its_life_than_a_row_has_room_for(gateway):
    for start in (0, MOST_WORKERS - 1):
        decode = {key_of(f"w{start + i}"): Load(1, 1) for i in range(MOST_WORKERS - 1)} | {KEYS[0]: Load(3, 3)}
        gateway.heard.take(message_of(Figures({}, decode, None, {}), ONE, start + 1), 0.0)
        assert gateway.held()[0] == (3, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, r"version: the peer speaks 2, this gateway 1; run the same version"),
        ({"version": None}, "version"),
        ({"identity": "x"}, "identity"),
        ({"sequence": 0}, "sequence"),
        ({"decode": [["zz", 1, 1]]}, "decode"),
        ({"decode": [[f"{KEYS[0]:016x}", -1, 1]]}, "decode"),
        ({"decode": [[f"{KEYS[0]:016x}", 1, 1 << 60]]}, "decode"),
        ({"use": {"layers": 0, "experts": 4, "workers": []}}, "layers"),
    ],
)
def test_a_malformed_message_is_refused_by_name(change, words):
    body = msgspec.to_builtins(said([1]))
    with pytest.raises(WireError, match=words):
        read_message(msgspec.msgpack.encode({**body, **change}))
    assert read_message(write_message(said([1]))).version == VERSION


def test_a_gateway_of_another_model_or_of_other_workers_is_refused(gateway):
    with pytest.raises(InputError, match="the peer's model has 3x4 experts, this gateway's 2x4"):
        gateway.heard.take(said([1], shape=(3, 4)), 0.0)
    alien = Figures({}, {key_of("x"): Load(1, 1)}, None, {})
    with pytest.raises(InputError, match="none of the peer's 1 workers is one of this gateway's"):
        gateway.heard.take(message_of(alien, ONE, 1), 0.0)
    assert gateway.heard.views == {}
    assert gateway.held()[0] == (0, 0)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ({KEYS[0]: (1, row(1)[:4])}, "16 bytes of sums"),
        ({KEYS[0]: (1, np.full(8, LEAST_IN_ROW - 1))}, "1 requests at worker .* cannot have sums"),
        ({KEYS[0]: (0, row(1))}, "0 requests at worker"),
        ({KEYS[2]: (1, row(1))}, "not in decode"),
    ],
)
def test_sums_that_requests_cannot_have_are_refused(gateway, batches, words):
    with pytest.raises(InputError, match=words):
        gateway.heard.take(said([1], batches=batches), 0.0)
    assert gateway.heard.views == {}


@given(st.integers(1, 300), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_sums_of_any_size_come_as_they_were(requests, seed):
    least = KERNEL.row(np.array([1 - 1e-6], np.float32)).astype(np.int64)[0]
    sums = np.random.default_rng(seed).integers(requests * least, 1, 8)
    message = said([requests], batches={KEYS[0]: (requests, sums)})
    figures = figures_of(message)
    assert figures.batches[KEYS[0]][0] == requests
    assert figures.batches[KEYS[0]][1].tolist() == sums.tolist()


def test_a_message_of_256_workers_of_a_large_model_is_within_the_bound():
    sums = np.full(58 * 256, -(1 << 30))
    keys = [key_of(str(i)) for i in range(256)]
    figures = Figures({}, {key: Load(1, 1) for key in keys}, (58, 256), dict.fromkeys(keys, (100, sums)))
    assert len(write_message(message_of(figures, ONE, 1))) < MAX_MESSAGE_BYTES


def test_changes_are_told_at_the_next_look_and_all_is_told_once_in_a_while():
    pace = Pace(1.0)
    assert pace.due(0.0, "x")
    pace.began(0.0, "x")
    assert not pace.due(5.0, "y"), "one at a time"
    pace.ended(taken=True)
    assert not pace.due(0.25, "x")
    assert pace.due(0.25, "y")
    assert not pace.due(0.75, "x")
    assert pace.due(1.0, "x")
    pace.began(1.0, "x")
    pace.ended(taken=False)
    assert not pace.due(1.25, "y"), "who did not take one is left alone for a while"
    assert pace.due(2.0, "y")


def test_more_than_a_message_could_say_is_refused_before_memory_is_taken_for_it(gateway):
    body = msgspec.to_builtins(said([1, 1]))
    body["use"] = {"layers": 4096, "experts": 65536, "workers": []}
    with pytest.raises(InputError, match="2 workers of 4096 x 65536 experts are more than a message"):
        gateway.heard.take(read_message(msgspec.msgpack.encode(body)), 0.0)


MESSAGE = write_message(said([1, 2, 0], batches={KEYS[0]: (1, row(1)), KEYS[1]: (2, row(2))}))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255)), max_size=6), st.integers(0, 20))
def test_whatever_bytes_come_they_count_or_are_refused_and_nothing_else_fails(tmp_path_factory, changes, cut):
    gateway = Gateway(tmp_path_factory.getbasetemp())
    body = bytearray(MESSAGE)
    for place, byte in changes:
        body[place] = byte
    try:
        gateway.heard.take(read_message(bytes(body[: len(body) - cut])), 0.0)
    except InputError:
        assert gateway.held() == [(0, 0)] * 3
        assert gateway.heard.views == {}
    gateway.close()
