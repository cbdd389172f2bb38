import itertools
import logging

import numpy as np
import pytest
from fake_servers import EXPERTS, GEOMETRY, HIDDEN, LAYERS, TOP_K, FakeServer, World, expected
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import EngineError, InputError
from coterie.experts.client import Patience, RemoteExperts, RoutingTable, Server

FAULTS = ["reply", "late", "never", "die", "die_late", "stale", "torn", "absent", "short"]


def client(world, **patience):
    return RemoteExperts(
        GEOMETRY, HIDDEN, world, world.connect, patience=Patience(**{"reply_s": 0.1, **patience}), clock=world.clock
    )


def tokens(count, seed=0):
    """Hidden states, ids and weights; all of them whole numbers."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(-4, 5, (count, HIDDEN)).astype(np.float32)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(count)]).reshape(count, TOP_K)
    return hidden, ids, rng.integers(1, 4, ids.shape).astype(np.float32)


def compute(remote, count=5, layer=1, deadline_s=60.0, seed=0):
    """Compute, compare with the sum over all pairs, and return the sum."""
    hidden, ids, weights = tokens(count, seed)
    got = remote.compute(layer, hidden, ids, weights, deadline_s)
    assert got.dtype == np.float32
    assert (got == expected(layer, hidden, ids, weights)).all()
    return got


def without(*missing):
    return [set(range(EXPERTS)) - set(missing)] * LAYERS


def pairs_asked(server):
    return sum(int((request.ids >= 0).sum()) for request in server.asked)


# --- sums ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=4),
    st.integers(0, 30),
    st.integers(1, 9),
    st.integers(0, 1000),
)
def test_whoever_holds_what_the_sum_is_that_of_all_pairs(held, count, most, seed):
    everything = FakeServer()
    world = World(*[FakeServer(held=own) for own in held], everything, tokens=most)
    remote = client(world)
    for layer in range(LAYERS):
        compute(remote, count, layer, seed=seed)
    asked = sum(map(pairs_asked, world.servers.values()))
    assert asked == LAYERS * count * TOP_K  # each pair once
    assert all(len(request.hidden) <= most for one in world.servers.values() for request in one.asked)


def test_one_server_gets_the_call_as_it_is():
    world = World(FakeServer())
    compute(client(world), 5)
    (request,) = world.servers["a"].asked
    hidden, ids, weights = tokens(5)
    assert (request.hidden == hidden).all()
    assert (request.ids == ids).all()
    assert (request.weights == weights).all()


def test_two_calls_may_be_under_way_at_once():
    world = World(FakeServer(), FakeServer())
    remote = client(world)
    inputs = [tokens(4, seed) for seed in range(2)]
    started = [remote.start(0, *some) for some in inputs]
    for one, some in zip(reversed(started), reversed(inputs), strict=True):
        assert (one.finish(60) == expected(0, *some)).all()


def test_a_call_gets_the_slot_of_an_earlier_one_that_nobody_waits_for_yet():
    world = World(FakeServer(slots=1), FakeServer(held=[set()] * LAYERS))
    remote = client(world)
    inputs = [tokens(4, seed) for seed in range(3)]
    started = [remote.start(0, *some) for some in inputs]
    for one, some in zip(reversed(started), reversed(inputs), strict=True):
        assert (one.finish(60) == expected(0, *some)).all()
    assert world.clock.now() < 0.2
    assert not world.doubts


def test_a_reply_that_came_by_the_deadline_is_taken_after_it():
    world = World(FakeServer())
    some = tokens(3)
    started = client(world).start(0, *some)
    world.advance_to(5.0)
    assert (started.finish(2.0) == expected(0, *some)).all()


def test_a_call_that_was_cancelled_leaves_its_connections_to_the_next():
    world = World(FakeServer(slots=1))
    remote = client(world)
    remote.start(0, *tokens(3)).cancel()
    compute(remote)
    remote.close()
    assert not world.open


def test_a_call_that_was_cut_for_larger_slots_is_cut_again_by_a_newer_table():
    world = World(FakeServer(script=["die"]), FakeServer(held=[set()] * LAYERS), tokens=8)
    remote, small, some = client(world), world.servers["b"], tokens(8)
    started = remote.start(0, *some)
    world.tokens, small.tokens, small.held = 3, 3, [set(range(EXPERTS))] * LAYERS
    world.announce()
    assert (started.finish(60) == expected(0, *some)).all()
    assert [len(request.hidden) for request in small.asked] == [2, 3, 3]


def test_a_request_that_does_not_fit_a_slot_leaves_nothing_under_way():
    """Nobody's table says so, but a server may be started anew with smaller slots."""
    world = World(FakeServer(held=without(3, 4, 5)), FakeServer(held=without(0, 1, 2), tokens=1))
    remote = client(world)
    with pytest.raises(InputError, match="4 tokens; the slot holds 1"):
        remote.start(0, *tokens(5))
    assert not any(link.busy for link in world.open)
    world.servers["b"].tokens = 64
    compute(remote)
    remote.close()
    assert not world.open


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    world = World(FakeServer())
    remote = client(world)
    hidden, ids, weights = tokens(3)
    for layer, arrays, message in [
        (LAYERS, (hidden, ids, weights), "layer 2 of 2"),
        (0, (hidden[:2], ids, weights), r"hidden states \(2, 3\) and ids \(3, 2\)"),
        (0, (hidden[:, :2], ids, weights), r"need \[T, 3\]"),
        (0, (hidden, ids, weights[:1]), r"weights \(1, 2\) for ids \(3, 2\)"),
        (0, (hidden, ids + EXPERTS, weights), r"experts \d to 11 of 6"),
        (0, (hidden, ids - EXPERTS, weights), r"experts -\d to -1 of 6"),
    ]:
        with pytest.raises(InputError, match=message):
            remote.start(layer, *arrays)
    assert not world.servers["a"].asked
    with pytest.raises(InputError, match="must be positive"):
        Patience(reply_s=0)


# --- faults --------------------------------------------------------------------------------------------


def test_two_replicas_give_the_sum_once_whatever_happens_or_both_are_named():
    for first, second, of_b in itertools.product(FAULTS[:6], repeat=3):
        scripts = ([first, second], [of_b])
        world = World(*(FakeServer(script=list(script)) for script in scripts))
        problem = problem_of(client(world))
        if problem:
            assert all(
                one.dead or "never" in script for one, script in zip(world.servers.values(), scripts, strict=True)
            )
            assert "a (" in problem
            assert "b (" in problem
            assert world.clock.now() == pytest.approx(2.0, abs=0.03)
        assert not any(link.busy for link in world.open if not link.probes)


def problem_of(remote):
    """Why a call fails; None if its sums are right."""
    try:
        compute(remote, deadline_s=2.0)
    except EngineError as error:
        return str(error)
    return None


@given(
    st.lists(st.lists(st.sampled_from(FAULTS), max_size=6), min_size=3, max_size=3),
    st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=3, max_size=3),
    st.integers(1, 12),
)
def test_a_server_that_never_fails_holds_all_so_every_call_succeeds(scripts, missing, count):
    faulty = [FakeServer(script=list(one), held=without(*lacks)) for one, lacks in zip(scripts, missing, strict=True)]
    world = World(*faulty, FakeServer())
    remote = client(world)
    for call in range(4):
        compute(remote, count, seed=call, deadline_s=world.clock.now() + 10)


def test_what_one_server_computed_is_not_asked_for_again_when_another_dies():
    world = World(FakeServer(), FakeServer(script=["die"]), FakeServer())
    compute(client(world), 6)
    first = {name: server.asked[0] for name, server in world.servers.items()}
    again = [request for name in "ac" for request in world.servers[name].asked[1:]]
    lost = sorted(zip(*np.nonzero(first["b"].ids >= 0), strict=True))
    assert sum(int((request.ids >= 0).sum()) for request in again) == len(lost)
    assert len(world.servers["b"].asked) == 1


def test_what_a_server_refused_is_sent_again_while_another_one_still_computes():
    refuses = FakeServer(script=["stale"], held=without(3, 4, 5))
    world = World(refuses, FakeServer(script=["late"], held=without(0, 1, 2)))
    by_then = []
    world.at(0.01, lambda: by_then.append(len(refuses.asked)))  # it refuses after 1 ms, the other one replies after 1 s
    compute(client(world), seed=next(seed for seed in range(9) if tokens(5, seed)[1][0, 0] < 3))  # it is asked first
    assert by_then == [2]


def test_the_sum_is_added_in_the_same_order_whoever_computed_what():
    """With values that are not exact: the bits tell the order."""
    hidden, ids, weights = tokens(9)
    hidden, weights = hidden / 3, weights / 7
    undisturbed = client(World(FakeServer(), FakeServer())).compute(0, hidden, ids, weights, 60)
    for name, script in itertools.product("ab", FAULTS[1:]):
        servers = {"a": FakeServer(), "b": FakeServer(), name: FakeServer(script=[script])}
        got = client(World(*servers.values())).compute(0, hidden, ids, weights, 60)
        assert (got == undisturbed).all(), (name, script)


def test_a_suspect_server_gets_nothing_new_until_it_replies_to_a_probe(caplog):
    caplog.set_level(logging.INFO)
    stopped = FakeServer(stopped=True)
    world = World(FakeServer(), stopped)
    remote = client(world)
    compute(remote)
    compute(remote)
    assert len(stopped.asked) == 1
    stopped.stopped = False
    world.advance_to(10.0)
    compute(remote)  # hears of the probe
    assert len(stopped.asked) == 2
    assert [record.message for record in caplog.records] == [
        "expert server b is suspect: no reply in 0.1 s",
        "expert server b is good",
    ]


@pytest.mark.parametrize(("what", "gone"), [("die", True), ("never", False), ("torn", False)])
def test_the_directory_hears_once_of_a_server_that_does_not_reply_and_whether_that_is_certain(what, gone):
    world = World(FakeServer(script=[what]), FakeServer())
    remote = client(world, probe_s=1e9)
    for seed in range(4):
        compute(remote, seed=seed)
    assert world.doubts == [("a", gone)]


def test_a_client_s_own_work_is_no_server_s_delay():
    """The request is on its way only while the client waits, as where it could not be sent at once."""
    slow = FakeServer(stopped=True)
    world = World(slow, FakeServer(held=[set()] * LAYERS))
    some = tokens(5)
    started = client(world).start(0, *some)
    world.advance_to(5.0)
    world.at(5.05, lambda: setattr(slow, "stopped", False))
    assert (started.finish(60) == expected(0, *some)).all()
    assert not world.doubts


def test_patience_with_a_server_is_lost_once_for_all_calls_that_were_under_way():
    world = World(FakeServer(stopped=True), FakeServer())
    remote = client(world)
    inputs = [tokens(5, seed) for seed in range(3)]
    started = [remote.start(0, *some) for some in inputs]
    for one, some in zip(started, inputs, strict=True):
        assert (one.finish(60) == expected(0, *some)).all()
    assert world.clock.now() == pytest.approx(0.1, abs=0.08)  # and 20 ms for each call, to see what has come


def test_connecting_finds_out_who_does_not_reply(caplog):
    world = World(FakeServer(), FakeServer(stopped=True), FakeServer(slots=0))
    remote = client(world)
    remote.connect(1.0)
    assert [record.message for record in caplog.records] == [
        "expert server c is lost: all slots are taken",
        "expert server b is suspect: no reply to a first request",
    ]
    compute(remote)
    assert len(world.servers["a"].asked) == 1
    assert len(world.open) == 2


def test_the_last_owner_of_an_expert_is_waited_for_and_asked_again():
    late = FakeServer(script=["late", "late"])
    compute(client(World(FakeServer(held=without(0)), late)), 9)
    assert len(late.asked) == 1  # suspect, but what it has been asked is not withdrawn
    torn = FakeServer(script=["torn", "stale", "reply"])
    compute(client(World(torn)))
    assert len(torn.asked) == 3


def test_an_expert_that_nobody_holds_is_named_at_the_deadline_with_what_became_of_its_servers():
    dead = FakeServer(script=["die"])
    world = World(FakeServer(held=without(2)), dead)
    hidden = np.ones((1, HIDDEN), np.float32)
    ids, weights = np.array([[1, 2]]), np.ones((1, 2), np.float32)
    with pytest.raises(EngineError, match=r"layer 0: no reply .* experts \[2\]; .* at epoch 0: b \(lost: it is gone\)"):
        client(world).compute(0, hidden, ids, weights, 3.0)
    world = World(FakeServer(held=without(2)))
    with pytest.raises(EngineError, match=r"experts \[2\]; their servers, at epoch 0: none"):
        client(world).compute(0, hidden, ids, weights, 3.0)


def test_an_expert_without_a_server_is_computed_once_one_comes():
    world = World(FakeServer(held=without(2)))

    def comes():
        world.servers["b"] = FakeServer()
        world.announce()

    world.at(1.0, comes)
    compute(client(world), 9, deadline_s=3.0)
    assert world.clock.now() == pytest.approx(1.0, abs=0.05)


def test_a_server_whose_experts_changed_is_asked_by_the_new_table_only():
    world = World(FakeServer(), FakeServer())
    remote = client(world)
    compute(remote)
    moved = world.servers["b"]
    moved.held, moved.epoch = without(0, 1, 2), world.announce()
    moved.asked.clear()
    compute(remote, 9)
    assert [request.epoch for request in moved.asked] == [0, 1][: len(moved.asked)]
    assert not np.isin(moved.asked[-1].ids, [0, 1, 2]).any() or len(moved.asked) == 1


def test_a_request_that_a_server_finds_malformed_is_not_sent_to_others():
    world = World(FakeServer(script=["malformed"]), FakeServer())
    remote = client(world)
    with pytest.raises(InputError, match="a finds a request malformed"):
        compute(remote)
    assert len(world.servers["b"].asked) == 1
    assert not any(link.busy for link in world.open)


def test_a_request_that_a_server_finds_malformed_is_an_error_of_its_own_call_alone():
    """Whoever waits when that is heard: here a call that wants the same slot."""
    world = World(FakeServer(script=["malformed"], slots=1))
    remote, some = client(world), tokens(5)
    wrong, right = (remote.start(0, *some) for _ in range(2))
    assert (right.finish(60) == expected(0, *some)).all()
    with pytest.raises(InputError, match="a finds a request malformed"):
        wrong.finish(60)
    compute(remote)


def test_a_server_without_free_slots_is_passed_over_while_others_have_its_experts():
    world = World(FakeServer(slots=0), FakeServer())
    compute(client(world))
    assert not world.servers["a"].asked


def test_a_connection_that_failed_is_left_to_others():
    world = World(FakeServer(script=["torn", "short", "torn"]), FakeServer(script=["die"]))
    remote = client(world)
    compute(remote)
    remote.close()
    assert not world.open


def test_servers_that_left_the_table_lose_their_connections():
    world = World(FakeServer(), FakeServer())
    remote = client(world)
    compute(remote)
    gone = world.servers.pop("b")
    world.announce()
    world.await_newer(world.table(), 0.0)
    compute(remote)
    assert gone not in [link.server for link in world.open]


# --- who is asked --------------------------------------------------------------------------------------


def test_replicas_share_the_pairs_and_the_one_with_less_in_flight_gets_more():
    world = World(FakeServer(), FakeServer())
    remote = client(world)
    hidden, weights = np.ones((6, HIDDEN), np.float32), np.ones((6, 1), np.float32)
    started = remote.start(0, hidden, np.arange(6)[:, None], weights)
    assert [pairs_asked(server) for server in world.servers.values()] == [3, 3]
    world.servers["a"].asked.clear()
    more = remote.start(0, hidden[:1], np.array([[5]]), weights[:1])  # 3 + 1 at one of them
    third = remote.start(0, hidden[:1], np.array([[5]]), weights[:1])  # then at the other
    assert [pairs_asked(server) for server in world.servers.values()] == [1, 4]
    for one in (started, more, third):
        one.finish(60)


def test_experts_of_one_owner_come_first_so_that_replicas_make_up_for_them():
    # a alone has expert 0 with 4 tokens, so the 2 + 2 tokens of experts 1 and 2 go to b
    world = World(FakeServer(), FakeServer(held=without(0)))
    ids = np.array([[0], [0], [0], [0], [1], [1], [2], [2]])
    ones = np.ones((8, HIDDEN), np.float32)
    client(world).compute(0, ones, ids, ones[:, :1].copy(), 60)
    assert set(world.servers["a"].asked[0].ids.ravel()) == {0}
    assert set(world.servers["b"].asked[0].ids.ravel()) == {1, 2}


def test_servers_with_equal_load_take_turns():
    world = World(FakeServer(), FakeServer(), FakeServer())
    remote = client(world)
    one = np.ones((1, HIDDEN), np.float32), np.array([[4]]), np.ones((1, 1), np.float32)
    order = []
    for _ in range(6):
        before = {name: len(server.asked) for name, server in world.servers.items()}
        remote.compute(0, *one, 60)
        order += [name for name, server in world.servers.items() if len(server.asked) > before[name]]
    assert order == list("abcabc")


def test_a_table_of_servers_that_hold_what_the_model_does_not_have_is_refused():
    for held, tokens_of, message in [
        ([{1}], 1, "experts of 1 layers; need 2"),
        ([{1}, {6}], 1, "a, layer 1: expert 6 of 6"),
        ([{1}, {2}], 0, "0 tokens; need one"),
    ]:
        with pytest.raises(InputError, match=message):
            RoutingTable.of(GEOMETRY, {Server("a", "x"): held}, epoch=0, tokens=tokens_of)
