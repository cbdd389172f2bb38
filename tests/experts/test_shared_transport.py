import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from coterie.errors import EngineError, InputError, WireError
from coterie.experts.protocol import Reply, Request, SlotShape, State, Status, Word, claim, post, rules
from coterie.experts.transport import Intake, SharedClient, SharedServer
from coterie.experts.transport.doorbell import Doorbell
from coterie.experts.transport.identity import is_alive, is_ending, own_identity

SHAPE = SlotShape(tokens=4, hidden=8, top_k=2, layers=2, experts=4)


def request(value=1.0):
    ids, weights = np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
    return Request(0, 0, own_identity(), np.full((1, 8), value, np.float32), ids, weights)


def doubled(requests):
    return [Reply(0, Status.COMPUTED, 2 * one.hidden) for one in requests]


def step(server, compute, timeout_s):
    return Intake(server).step(compute, timeout_s)


@pytest.fixture
def server():
    server = SharedServer(SHAPE, slots=2)
    yield server
    server.close()


@pytest.fixture
def serving(server):
    """A server that a thread runs until its test is over."""
    over = []
    thread = Thread(target=lambda: [step(server, doubled, 0.01) for _ in iter(lambda: bool(over), True)])
    thread.start()
    yield server
    over.append(True)
    thread.join()


OTHER = """
import sys, time
sys.path.append({tests!r})
from test_shared_transport import *
{script}
"""


def other_process(script, **kwargs):
    """Another process that runs a script, up to its first line of output."""
    code = OTHER.format(tests=str(Path(__file__).parent), script=script)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **kwargs)
    return process, process.stdout.readline().strip()


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_each_client_gets_the_reply_to_its_own_request(serving):
    clients = [SharedClient(serving.path) for _ in range(2)]
    for value in range(20):
        for place, client in enumerate(clients):
            reply = client.call(request(10 * value + place), timeout_s=5)
            assert (reply.sums == 2 * (10 * value + place)).all()


def test_requests_that_are_ready_together_are_computed_together(server):
    clients = [SharedClient(server.path) for _ in range(2)]
    for client in clients:
        post(client._slot, request())
    assert step(server, doubled, 1) == 2


def test_a_client_finds_no_slot_where_all_are_taken_and_one_where_one_was_left(server):
    first, _ = SharedClient(server.path), SharedClient(server.path)
    with pytest.raises(EngineError, match="all 2 slots are taken"):
        SharedClient(server.path)
    first.close()
    with pytest.raises(InputError, match="closed"):
        first.call(request(), 1)
    SharedClient(server.path)


def test_a_late_reply_is_not_taken_for_that_to_the_next_request(server):
    client = SharedClient(server.path)

    def compute_late(requests):
        rules.withdraw(client._slot, 1)  # the client lost patience meanwhile
        assert post(client._slot, request(7)) == 2
        return doubled(requests)

    post(client._slot, request(5))
    step(server, compute_late, 1)
    assert rules.take(client._slot, 2) is None
    step(server, doubled, 1)
    assert (rules.take(client._slot, 2).sums == 14).all()


def test_a_server_that_does_not_reply_costs_the_time_that_was_given(server):
    client = SharedClient(server.path)
    with pytest.raises(EngineError, match="did not reply in time"):
        client.call(request(), timeout_s=0.03)
    assert rules.state_of(client._slot.load(Word.STATE)) is State.FREE


def test_a_look_that_finds_no_reply_leaves_the_request_wanted(server):
    pending = SharedClient(server.path).post(request())
    assert pending.look(0.0) is None
    step(server, doubled, 1)
    assert (pending.look(0.0).sums == 2).all()


def test_a_reply_that_cannot_be_read_leaves_the_slot_free(serving, monkeypatch):
    client = SharedClient(serving.path)
    with monkeypatch.context() as broken:
        broken.setattr(client._slot, "read_reply", raises_torn)
        with pytest.raises(WireError, match="torn"):
            client.call(request(), timeout_s=5)
    assert (client.call(request(3), timeout_s=5).sums == 6).all()


def raises_torn():
    raise WireError("torn")


def test_a_request_that_was_withdrawn_while_it_was_read_is_none(server, monkeypatch):
    client = SharedClient(server.path)
    post(client._slot, request())
    monkeypatch.setattr(server._slots[0], "read_request", lambda: (rules.withdraw(client._slot, 1), raises_torn()))
    assert step(server, doubled, 0) == 0


def bad_layer(slot):
    struct.pack_into("<I", slot._memory, 64 + 24, 9)


def bad_number(slot):
    struct.pack_into("<Q", slot._memory, 64, 77)


@pytest.mark.parametrize("damage", [bad_layer, bad_number])
def test_a_request_that_breaks_the_protocol_is_refused_and_others_beside_it_are_computed(damage, server):
    clients = [SharedClient(server.path) for _ in range(2)]
    pending = [client.post(request(3)) for client in clients]
    damage(clients[0]._slot)
    intake = Intake(server)
    assert intake.step(doubled, 1) == 2
    refused, computed = (one.wait(time.monotonic() + 5) for one in pending)
    assert (refused.status, refused.sums.shape) == (Status.MALFORMED, (0, 8))
    assert (computed.sums == 6).all()
    assert intake.malformed == 1


def test_requests_at_two_servers_are_under_way_at_once(server):
    other = SharedServer(SHAPE, slots=1)
    pending = [SharedClient(one.path).post(request(value)) for value, one in enumerate((server, other))]
    for one in (other, server):
        assert step(one, doubled, 1) == 1
    deadline_s = time.monotonic() - 1  # what is there already is taken even so
    assert [one.wait(deadline_s).sums.max() for one in pending] == [0, 2]
    other.close()


def test_a_request_that_its_client_withdrew_is_not_computed(server):
    client = SharedClient(server.path)
    client.post(request()).withdraw()
    assert step(server, doubled, 0) == 0
    pending = client.post(request(4))
    step(server, doubled, 1)
    assert (pending.wait(time.monotonic()).sums == 8).all()


def test_a_server_that_was_killed_is_found_out_and_its_file_removed_by_the_next():
    process, path = other_process(
        "server = SharedServer(SHAPE, 1); print(server.path, flush=True)\nwhile True: step(server, doubled, 1)"
    )
    client = SharedClient(Path(path))
    assert (client.call(request(), 5).sums == 2).all()
    os.kill(process.pid, signal.SIGSTOP)
    Thread(target=lambda: (time.sleep(0.05), process.kill())).start()
    with pytest.raises(EngineError, match="died"):
        client.call(request(), 60)
    end(process)
    SharedServer(SHAPE, 1).close()
    assert not Path(path).exists()
    with pytest.raises(EngineError, match="is gone"):
        SharedClient(Path(path))


def test_the_slot_of_a_client_that_was_killed_is_swept_with_its_request(server):
    claims = f"client = SharedClient(Path({str(server.path)!r}));"
    process, _ = other_process(claims + "post(client._slot, request()); print(flush=True); time.sleep(60)")
    mine = SharedClient(server.path)
    end(process)
    time.sleep(0.11)
    while step(server, doubled, 0.01):  # what the dead one asked for, if that comes first
        pass
    SharedClient(server.path)
    assert mine._slot.load(Word.OWNER) == own_identity()


def test_a_damaged_file_is_refused(server, tmp_path):
    data = server.path.read_bytes()
    for damage, message in [
        (b"x" + data[1:], "need b'coterexp'"),
        (data[:100], "100 bytes are no segment"),
        (b"", "empty"),
        (data[:-4096], "bytes for 2 slots"),
        (data[:24] + bytes(20) + data[44:], "tokens must be from 1"),
    ]:
        (tmp_path / "file").write_bytes(damage)
        with pytest.raises(WireError, match=message):
            SharedClient(tmp_path / "file")


def test_a_server_without_slots_is_refused():
    with pytest.raises(InputError, match="0 slots; need one"):
        SharedServer(SHAPE, slots=0)


def test_a_process_is_alive_until_it_ends_and_known_by_its_start():
    process, identity = other_process("print(own_identity(), flush=True); time.sleep(60)")
    assert is_alive(int(identity))
    assert not is_alive(int(identity) ^ 1)  # another process of the same id
    process.kill()
    while is_alive(int(identity)):
        time.sleep(0.001)
    end(process)  # only now is it no zombie any more


def killed(script):
    """For each look at a process that was killed, until it is over: whether it was seen to end, and to be alive."""
    process, identity = other_process(f"{script}; print(own_identity(), flush=True); time.sleep(60)")
    assert not is_ending(int(identity))
    process.kill()
    looks = [(is_ending(int(identity)), is_alive(int(identity)))]
    while looks[-1][1]:
        looks.append((is_ending(int(identity)), is_alive(int(identity))))
    end(process)
    return looks


def test_a_process_that_was_killed_is_seen_to_end_before_its_memory_is_freed():
    assert is_ending(own_identity() ^ 1)  # another process of the same id
    assert any((True, True) in killed("memory = b'x' * (256 << 20)") for _ in range(10))  # unless others have the cores


def test_a_ring_before_the_wait_is_seen_and_silence_ends_in_time(server):
    bell = Doorbell(server._bell._words, 128)
    found = iter([None, "news"])
    Thread(target=lambda: (time.sleep(0.02), bell.ring())).start()
    assert bell.wait(lambda: next(found), 5) == "news"
    assert bell.wait(lambda: None, 0.01) is None


def test_claiming_takes_one_of_two(server):
    slot = server._slots[0]
    assert [claim(slot, 5), claim(slot, 6)] == [True, False]
