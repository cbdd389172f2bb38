from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError, WireError
from coterie.experts.protocol import Dtype, Reply, SlotShape, Status, frames
from slot_requests import request_for

SHAPE = SlotShape(tokens=5, hidden=3, top_k=2, layers=3, experts=16, fingerprint=bytes(range(16)))
LINE = 64


request = partial(request_for, SHAPE)


def joined(pieces):
    data = b"".join(pieces)
    return data[:LINE], np.frombuffer(data[LINE:], np.uint8).copy()


@given(st.integers(0, 5), st.sampled_from(Dtype), st.integers(1, 2**64 - 1))
def test_what_is_written_is_read(tokens, dtype, sequence):
    sent = request(tokens, dtype)
    line, body = joined(frames.write_request(SHAPE, sequence, sent))
    head = frames.read_head(SHAPE, line)
    assert (head.sequence, head.size) == (sequence, len(body))
    got = frames.read_request(SHAPE, head, body)
    assert (got.layer, got.epoch, got.owner, got.dtype) == (1, 7, 1 << 40, dtype)
    for name in ("hidden", "ids", "weights"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))

    line, body = joined(frames.write_reply(SHAPE, sequence, Reply(3, Status.STALE, sent.hidden, dtype)))
    head = frames.read_reply_head(SHAPE, line)
    assert (head.sequence, head.size) == (sequence, len(body))
    reply = head.reply(body)
    assert (reply.epoch, reply.status, reply.dtype) == (3, Status.STALE, dtype)
    np.testing.assert_array_equal(reply.sums, sent.hidden)


@given(st.binary(min_size=LINE, max_size=LINE))
def test_any_line_is_read_or_refused_and_never_names_more_than_the_slot_carries(line):
    for read, most in ((frames.read_head, 5 * (8 * 2 + 4 * 3)), (frames.read_reply_head, 5 * 4 * 3)):
        try:
            head = read(SHAPE, line)
        except WireError:
            continue
        assert isinstance(head, frames.Withdrawal) or head.size <= most


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(24, 3, "layer 3 of 3"), (28, 6, "6 tokens of size 3"), (32, 4, "of size 4"), (36, 3, "top-3"), (36, 0, "top-0"),
     (40, 3, "unknown dtype 3"), (44, 0, "line of unknown kind 0"), (28, 2**32 - 1, "4294967295 tokens")],
)  # fmt: skip
def test_a_request_that_does_not_fit_is_refused_by_its_line(place, value, message):
    line = bytearray(joined(frames.write_request(SHAPE, 1, request()))[0])
    line[place : place + 4] = value.to_bytes(4, "little")
    with pytest.raises(WireError, match=message):
        frames.read_head(SHAPE, line)


def test_experts_that_the_model_does_not_have_are_refused_at_both_ends():
    stranger = request(ids=np.full((3, 2), 16, np.int32))
    with pytest.raises(InputError, match="experts 16 to 16 of 16"):
        frames.write_request(SHAPE, 1, stranger)
    wider = SlotShape(tokens=5, hidden=3, top_k=2, layers=3, experts=17)
    line, body = joined(frames.write_request(wider, 1, stranger))
    with pytest.raises(WireError, match="experts 16 to 16 of 16"):
        frames.read_request(SHAPE, frames.read_head(SHAPE, line), body)


def test_hellos_say_who_is_meant_and_what_a_slot_carries_of_which_model():
    token = bytes(range(16))
    assert frames.read_call(frames.write_call(token)) == token
    assert frames.read_answer(frames.write_answer(frames.Welcome.FULL, SHAPE, 9)) == (frames.Welcome.FULL, SHAPE, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"GET / HTTP/1.1\r\n".ljust(LINE), "need b'coterexp'"), (b"coterexp\x01".ljust(LINE, b"\0"), "version 1"),
     (b"coterexp\x02".ljust(LINE, b"\0"), "tokens must be from 1"),
     (frames.write_answer(3, SHAPE, 9), "3 is not a valid Welcome")],
)  # fmt: skip
def test_another_hello_is_refused(line, message):
    with pytest.raises(WireError, match=message):
        frames.read_answer(line)
