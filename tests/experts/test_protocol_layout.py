import contextlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError, WireError
from coterie.experts.protocol import Dtype, Reply, SlotShape, Status
from slot_requests import request_for

SHAPE = SlotShape(tokens=5, hidden=8, top_k=2, layers=3, experts=16)


request = partial(request_for, SHAPE)


def memory():
    """Of a slot that held something else before."""
    return memoryview(bytearray(b"\xa5" * SHAPE.size))


@given(st.integers(0, 5), st.sampled_from(Dtype), st.integers(1, 2**56 - 1))
def test_what_is_written_is_read(tokens, dtype, sequence):
    slot = memory()
    sent = request(tokens, dtype)
    SHAPE.write_request(slot, sequence, sent)
    SHAPE.write_reply(slot, sequence + 1, Reply(3, Status.COMPUTED, sent.hidden, dtype))
    read, got = SHAPE.read_request(slot)
    assert (read, got.layer, got.epoch, got.owner, got.dtype) == (sequence, 1, 7, 1 << 40, dtype)
    for name in ("hidden", "ids", "weights"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    read, reply = SHAPE.read_reply(slot)
    assert (read, reply.epoch, reply.status, reply.dtype) == (sequence + 1, 3, Status.COMPUTED, dtype)
    np.testing.assert_array_equal(reply.sums, sent.hidden)


def test_words_and_doorbell_are_left_alone():
    slot = memory()
    SHAPE.write_request(slot, 1, request(5))
    SHAPE.write_reply(slot, 1, Reply(3, Status.COMPUTED, request(5).hidden))
    assert bytes(slot[:64]) == b"\xa5" * 64


def test_what_was_read_stays_when_another_request_is_written():
    slot = memory()
    SHAPE.write_request(slot, 1, request(3))
    _, got = SHAPE.read_request(slot)
    SHAPE.write_request(slot, 2, request(4))
    np.testing.assert_array_equal(got.hidden, request(3).hidden)


def test_a_slot_is_as_large_as_its_parts_in_whole_cache_lines():
    # 192 of words and headers, 5 x 8 x 4 = 160 -> 192 hidden, 5 x 2 x 4 = 40 -> 64 ids, 64 weights, 192 sums
    assert SHAPE.size == 192 + 192 + 64 + 64 + 192


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 6}, "6 tokens of size 8, top-2; the slot holds 5 of size 8, top-2"),
        ({"layer": 3}, "layer 3 of 3"),
        ({"ids": np.zeros((2, 2), np.int32)}, r"ids \(2, 2\) and weights \(3, 2\) for 3 tokens"),
        ({"ids": np.zeros(2, np.int32)}, r"ids \(2,\) and weights \(3, 2\) for 3 tokens"),
        ({"ids": np.full((3, 2), 16, np.int32)}, "experts 16 to 16 of 16"),
        ({"ids": np.full((3, 2), -2, np.int32)}, "experts -2 to -2 of 16"),
        ({"ids": np.zeros((3, 2), np.int64)}, "ids of int64 and weights of float32; need int32 and float32"),
        ({"hidden": np.zeros((3, 8))}, "of float64; need .* float32"),
        ({"hidden": np.zeros((3, 4), np.float32)}, "3 tokens of size 4"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_before_anything_is_written(wrong, message):
    slot = memory()
    with pytest.raises(InputError, match=message):
        SHAPE.write_request(slot, 1, request(**wrong))
    assert bytes(slot) == b"\xa5" * SHAPE.size


def damaged(offset, value):
    slot = memory()
    SHAPE.write_request(slot, 1, request())
    SHAPE.write_reply(slot, 1, Reply(3, Status.COMPUTED, request().hidden))
    slot[offset : offset + 4] = np.int32(value).tobytes()
    return slot


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (64 + 24, 3, "layer 3 of 3"),
        (64 + 28, 6, "6 tokens"),
        (64 + 28, -1, "4294967295 tokens"),
        (64 + 32, 9, "of size 9"),
        (64 + 36, 3, "top-3"),
        (64 + 36, 0, "top-0"),
        (64 + 40, 3, "unknown dtype 3"),
        (192 + 192, 16, "experts -?[0-9]+ to 16 of 16"),
        (192 + 192, -2, "experts -2 to"),
    ],
)
def test_a_damaged_request_is_not_read(offset, value, message):
    with pytest.raises(WireError, match=message):
        SHAPE.read_request(damaged(offset, value))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (128 + 16, 4, "unknown status 4"),
        (128 + 20, 6, "6 tokens"),
        (128 + 24, 9, "of size 9"),
        (128 + 28, 3, "unknown dtype 3"),
    ],
)
def test_a_damaged_reply_is_not_read(offset, value, message):
    with pytest.raises(WireError, match=message):
        SHAPE.read_reply(damaged(offset, value))


@given(st.binary(min_size=128, max_size=128))
def test_any_bytes_are_read_or_refused(header):
    slot = memory()
    slot[64:192] = header
    for read in (SHAPE.read_request, SHAPE.read_reply):
        with contextlib.suppress(WireError):
            read(slot)


def test_a_shape_out_of_range_is_refused():
    with pytest.raises(InputError, match="top_k must be from 1 to 16, got 17"):
        SlotShape(tokens=5, hidden=8, top_k=17, layers=3, experts=16)
