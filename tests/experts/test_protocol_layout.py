import contextlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError, WireError
from coterie.experts.protocol import Dtype, Reply, SlotShape, Status, least_and_most
from coterie.experts.protocol.layout import SlotMemory
from slot_requests import request_for

SHAPE = SlotShape(tokens=5, hidden=8, top_k=2, layers=3, experts=16)


request = partial(request_for, SHAPE)


def used():
    """Bytes of a slot that held something else before, and what reads and writes them."""
    memory = memoryview(bytearray(b"\xa5" * SHAPE.size))
    return memory, SlotMemory(SHAPE, memory)


@given(st.integers(0, 5), st.sampled_from(Dtype), st.integers(1, 2**56 - 1))
def test_what_is_written_is_read(tokens, dtype, sequence):
    _, slot = used()
    sent = request(tokens, dtype)
    slot.write_request(sequence, sent)
    slot.write_reply(sequence + 1, Reply(3, Status.COMPUTED, sent.hidden, dtype))
    read, got = slot.read_request()
    assert (read, got.layer, got.epoch, got.owner, got.dtype) == (sequence, 1, 7, 1 << 40, dtype)
    for name in ("hidden", "ids", "weights"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    read, reply = slot.read_reply()
    assert (read, reply.epoch, reply.status, reply.dtype) == (sequence + 1, 3, Status.COMPUTED, dtype)
    np.testing.assert_array_equal(reply.sums, sent.hidden)


def test_words_and_doorbell_are_left_alone():
    memory, slot = used()
    slot.write_request(1, request(5))
    slot.write_reply(1, Reply(3, Status.COMPUTED, request(5).hidden))
    assert bytes(memory[:64]) == b"\xa5" * 64


def test_what_was_read_stays_when_another_request_is_written():
    _, slot = used()
    slot.write_request(1, request(3))
    _, got = slot.read_request()
    slot.write_request(2, request(4))
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
    memory, slot = used()
    with pytest.raises(InputError, match=message):
        slot.write_request(1, request(**wrong))
    assert bytes(memory) == b"\xa5" * SHAPE.size


def damaged(offset, value):
    memory, slot = used()
    slot.write_request(1, request())
    slot.write_reply(1, Reply(3, Status.COMPUTED, request().hidden))
    memory[offset : offset + 4] = np.int32(value).tobytes()
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
        damaged(offset, value).read_request()


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
        damaged(offset, value).read_reply()


@given(st.binary(min_size=128, max_size=128))
def test_any_bytes_are_read_or_refused(header):
    memory, slot = used()
    memory[64:192] = header
    for read in (slot.read_request, slot.read_reply):
        with contextlib.suppress(WireError):
            read()


@given(st.lists(st.integers(-5, 99), max_size=80))
def test_the_least_and_the_largest_id_are_found_however_many_there_are(ids):
    expected = (min(ids), max(ids)) if ids else (-1, -1)
    assert least_and_most(np.array(ids, np.int32).reshape(1, -1)) == expected


def test_a_shape_out_of_range_is_refused():
    with pytest.raises(InputError, match="top_k must be from 1 to 16, got 17"):
        SlotShape(tokens=5, hidden=8, top_k=17, layers=3, experts=16)
