"""What holds of requests to an expert server whatever carries them; a test class of each transport inherits it.

The class's module has the fixtures `idle`, a `SteppedServer` that computes only where the test says so, and `busy`, one
that a thread runs.
"""

from __future__ import annotations

import time

import pytest

from coterie.errors import EngineError, InputError
from coterie.experts.protocol import Dtype
from coterie.experts.transport import SharedClient
from running_monitor import until
from stepped_server import DEADLINE_S, doubled, request


class LinkLaws:
    """See above."""

    full: str
    """What a client is told where all slots are taken."""

    @pytest.mark.parametrize("dtype", Dtype)
    def test_a_reply_has_the_bits_of_that_by_shared_memory(self, busy, dtype):
        clients = busy.client(), SharedClient(busy.shared.path)
        for tokens in (0, 1, 3, 4):
            sent = request(3, tokens=tokens, dtype=dtype)
            other, shared = (client.call(sent, DEADLINE_S) for client in clients)
            assert (other.epoch, other.status, other.dtype) == (shared.epoch, shared.status, shared.dtype)
            assert other.sums.tobytes() == shared.sums.tobytes()
        clients[0].close()

    def test_requests_that_are_ready_together_are_computed_together_whatever_brought_them(self, idle):
        client = idle.client()
        pending = client.post(request(1))
        until(lambda: idle.has(client, pending))
        by_shared = SharedClient(idle.shared.path).post(request(2))
        assert (idle.intake.clients, idle.intake.waiting) == (2, 2)
        assert idle.intake.step(doubled, 1) == 2
        assert [one.wait(time.monotonic() + DEADLINE_S).sums.max() for one in (pending, by_shared)] == [2, 4]
        client.close()

    def test_each_client_gets_the_reply_to_its_own_request(self, busy):
        unsent = set()
        clients = [busy.client(unsent) for _ in range(2)]
        for value in range(20):
            pending = [client.post(request(10 * value + place)) for place, client in enumerate(clients)]
            for place, one in enumerate(pending):
                assert (one.wait(time.monotonic() + DEADLINE_S).sums == 2 * (10 * value + place)).all()
        for client in clients:
            client.close()

    def test_a_request_that_was_withdrawn_while_it_was_computed_gets_no_reply(self, idle):
        client = idle.client()
        first, second = client.post(request(5)), []
        until(lambda: idle.has(client, first))

        def compute_late(requests):
            first.withdraw()
            second.append(client.post(request(7)))
            until(lambda: idle.has(client, second[0]))
            return doubled(requests)

        idle.step(compute_late)
        assert second[0].look(time.monotonic() + 0.05) is None
        idle.step()
        assert (second[0].wait(time.monotonic() + DEADLINE_S).sums == 14).all()
        client.close()

    def test_a_late_reply_is_not_taken_for_that_to_the_next_request(self, idle):
        client = idle.client()
        first = client.post(request(5))
        until(lambda: idle.has(client, first))
        idle.step()
        until(lambda: not idle.intake.waiting)  # the reply is on its way
        first.withdraw()
        second = client.post(request(7))
        assert second.look(time.monotonic() + 0.05) is None
        idle.step()
        assert (second.wait(time.monotonic() + DEADLINE_S).sums == 14).all()
        client.close()

    def test_a_server_that_does_not_reply_costs_the_time_that_was_given(self, idle):
        client = idle.client()
        with pytest.raises(EngineError, match="did not reply in time"):
            client.call(request(), timeout_s=0.03)
        until(lambda: idle.forgot(client))
        client.close()

    def test_a_client_finds_no_slot_where_all_are_taken_and_one_where_one_was_left(self, idle):
        first, second = idle.client(), idle.client()
        with pytest.raises(EngineError, match=self.full):
            idle.client()
        first.close()
        with pytest.raises(InputError, match="closed"):
            first.post(request())
        until(lambda: idle.other.clients == 1)
        idle.client().close()
        second.close()
