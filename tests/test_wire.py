"""Envelopes and routed-expert ids: what is written is read back, and what lies is refused."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import ExpertCounts, ModelGeometry
from coterie.errors import InputError, WireError
from coterie.wire import (
    count_ids,
    decode_counts,
    encode_counts,
    read_routed_experts,
    smallest_dtype,
)

GEOMETRY = ModelGeometry(layers=2, experts=4, top_k=2)


def random_ids(rng, tokens, geometry=GEOMETRY):
    """`[tokens, L, k]` distinct ids per row, never all zero (top-k > 1 makes that impossible)."""
    order = rng.random((tokens, geometry.layers, geometry.experts)).argsort(-1)
    return order[..., : geometry.top_k]


def counts_of(tokens, covered=None, geometry=GEOMETRY, seed=0):
    covered = tokens if covered is None else covered
    ids = random_ids(np.random.default_rng(seed), covered, geometry)
    return ExpertCounts(geometry, count_ids(ids, geometry.experts), tokens, covered)


@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**32 - 1), st.data()
)
@settings(max_examples=60, deadline=None)
def test_an_envelope_survives_json_and_keeps_every_count(layers, experts, a, b, seed, data):
    geometry = ModelGeometry(layers, experts, data.draw(st.integers(1, experts)))
    written = counts_of(max(a, b), min(a, b), geometry, seed)
    read = decode_counts(json.loads(json.dumps(encode_counts(written))))
    assert (read.geometry, read.tokens, read.covered) == (geometry, written.tokens, written.covered)
    np.testing.assert_array_equal(read.counts, written.counts)


@pytest.mark.parametrize(
    ("maximum", "dtype"),
    [(0, "|u1"), (255, "|u1"), (256, "<u2"), (65535, "<u2"), (65536, "<u4"), (1_000_000, "<u4"), (2**32 - 1, "<u4")],
)
def test_the_smallest_dtype_that_holds_the_maximum_is_used(maximum, dtype):
    assert smallest_dtype(maximum).str == dtype


@pytest.mark.parametrize("maximum", [-1, 2**32])
def test_a_count_that_fits_no_dtype_is_an_error(maximum):
    with pytest.raises(WireError, match=str(maximum)):
        smallest_dtype(maximum)


def test_a_prompt_of_a_million_tokens_that_all_chose_one_expert_does_not_overflow():
    counts = np.array([[1_000_000, 1_000_000, 0, 0]], np.uint32)
    written = ExpertCounts(ModelGeometry(1, 4, 2), counts, 1_000_000, 1_000_000)
    assert decode_counts(encode_counts(written)).counts.max() == 1_000_000


def envelope(**changes):
    fields = encode_counts(counts_of(tokens=5))
    fields.update(changes)
    return {name: value for name, value in fields.items() if value is not None}


SIZES = ("layers", "experts", "top_k", "tokens", "covered")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("text", "expected an object"),
        (envelope(v=2), "version 2 is not 1"),
        (envelope(v=None), "version None"),
        (envelope(counts=None), "missing counts"),
        (envelope(extra=1), "unknown fields"),
        (envelope(dtype="<f4"), "dtype '<f4'"),
        (envelope(dtype=["<u2"]), "dtype"),
        (envelope(layers=True), "layers must be"),
        (envelope(layers="2"), "layers must be"),
        (envelope(experts=-4), "experts must be"),
        (envelope(experts=0), "experts must be a whole number"),
        *((envelope(**{name: 10**400}), f"{name} must be a whole number of at most") for name in SIZES),
        (envelope(top_k=5), "top_k must be"),
        (envelope(layers=10**9), "layers must be"),
        (envelope(layers=4096, experts=65536), "bytes announced"),
        (envelope(layers=3), "do not hold"),
        (envelope(counts=7), "must be a base64 string"),
        (envelope(counts="!!!!!!!!!!!="), "invalid base64"),
        (envelope(tokens=4), "5 covered tokens of 4"),
        (envelope(covered=4), "layer 0 sums to 10, not to 4 tokens x top-2 = 8"),
    ],
)
def test_a_lying_envelope_is_refused_by_name(broken, message):
    with pytest.raises(WireError, match=message):
        decode_counts(broken)


def test_a_message_does_not_hold_what_was_sent():
    envelope = encode_counts(ExpertCounts(ModelGeometry(1, 2, 1), np.array([[1, 0]], np.uint8), tokens=1, covered=1))
    for name in envelope:
        with pytest.raises(WireError) as refused:
            decode_counts({**envelope, name: ["x" * 100_000] * 10})
        assert len(str(refused.value)) < 300


def test_an_expert_chosen_more_often_than_there_are_tokens_is_refused():
    # both layers sum to 2 tokens x top-2, but expert 0 would have been chosen twice by one token
    with pytest.raises(InputError, match="chosen 4 times by 2 tokens"):
        ExpertCounts(GEOMETRY, np.array([[4, 0, 0, 0], [2, 2, 0, 0]], np.uint8), 2, 2)


def test_counts_given_as_the_bytes_of_their_text_are_read_alike():
    fields = encode_counts(counts_of(tokens=5))
    text = fields["counts"].encode()
    np.testing.assert_array_equal(decode_counts({**fields, "counts": text}).counts, decode_counts(fields).counts)
    for wrong, problem in ((text + b"AAAA", "announced"), (b"!" + text[1:], "invalid base64")):
        with pytest.raises(WireError, match=problem):
            decode_counts({**fields, "counts": wrong})


def test_text_that_is_not_even_ascii_is_no_base64():
    fields = encode_counts(counts_of(tokens=5))
    for character in ("\u00e4", "\ud800"):
        with pytest.raises(WireError, match="invalid base64"):
            decode_counts({**fields, "counts": character + fields["counts"][1:]})


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_never_become_counts_or_crash(noise):
    with pytest.raises(WireError):
        decode_counts(envelope(counts=base64.b64encode(noise + b"x" * 50).decode()))


# --- routed-expert ids -------------------------------------------------------------------------------


def as_npy(ids, **kw):
    stream = io.BytesIO()
    np.save(stream, ids, **kw)
    return base64.b64encode(stream.getvalue()).decode()


def as_int32(ids):
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def as_object(ids):
    return {"data": base64.b64encode(ids.astype("<u2").tobytes()).decode(), "shape": list(ids.shape), "dtype": "uint16"}


def npy_with(header):
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()).decode()


@pytest.mark.parametrize("write", [as_npy, as_int32, as_object, lambda ids: ids.tolist()])
def test_every_engine_format_gives_the_same_ids(write):
    ids = random_ids(np.random.default_rng(3), 7)
    np.testing.assert_array_equal(read_routed_experts(write(ids), GEOMETRY), ids)


def test_dense_layers_are_left_out_by_name():
    ids = random_ids(np.random.default_rng(3), 7)
    all_layers = np.zeros((7, 3, 2), np.int64)
    all_layers[:, 1:] = ids
    read = read_routed_experts(as_npy(all_layers), GEOMETRY, model_layers=3, moe_layers=[1, 2])
    np.testing.assert_array_equal(read, ids)
    with pytest.raises(WireError, match="say which are MoE layers"):
        read_routed_experts(as_npy(all_layers), GEOMETRY, model_layers=3)
    with pytest.raises(WireError, match="ascending layer numbers"):
        read_routed_experts(as_npy(all_layers), GEOMETRY, model_layers=3, moe_layers=[2, 1])


GOOD = [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "neither a string"),
        ("?", "invalid base64"),
        (as_int32(np.zeros(5)), "not whole rows"),
        (as_npy(np.zeros((2, 2, 2))), "dtype float64"),
        (as_npy(np.asfortranarray(np.ones((2, 3, 4), np.int32))), "order F"),
        (as_npy(np.array(GOOD, np.uint8)[:, :1]), r"shape \(2, 1, 2\)"),
        (as_npy(np.array(GOOD, np.uint8))[:-8], "does not match its"),
        ([[[0, 1], [2, 4]]], "token 0, layer 1 holds an id outside 0..3"),
        ([[[0, 1], [2, -1]]], "an id outside"),
        ([[[0, 1], [2, 2]]], "token 0, layer 1 holds the same expert twice"),
        ([*GOOD, [[1, 0], [0, 0]]], "token 2, layer 1 holds only zeros"),
        ([[[0, 1]]], "not a list of 2 layers"),
        ([[[0], [1]]], "not a list of 2 ids"),
        ([[[0, 1], [2, 1 << 40]]], "does not fit 32 bits"),
        ([[[0, 1], [2, True]]], "not a list of 2 ids"),
        ({"data": ""}, "expected data, shape and dtype"),
        ({"data": "", "shape": [1 << 40, 2, 2], "dtype": "int32"}, "more than the"),
        ({"data": "AAAA", "shape": [2, 2, 2], "dtype": "int32"}, "do not hold"),
        ({"data": "", "shape": [0, 2, 2], "dtype": "object"}, "dtype 'object'"),
        ({"data": "", "shape": "2", "dtype": "int32"}, "not a list of whole numbers"),
        ({"data": "", "shape": [0, 2, 2], "dtype": []}, "dtype .* is not one of"),
        ({"data": "", "shape": [0, 10**30], "dtype": "int32"}, "is of no array"),
        ({"data": "", "shape": [0] * 99, "dtype": "int32"}, "is of no array"),
        (npy_with("{'descr': '|u1', 'fortran_order': False, 'shape': (0, -1)}"), "is of no array"),
        (npy_with("((("), "not a valid .npy"),
        (npy_with("'" * 3), "not a valid .npy"),
    ],
)
def test_damaged_rows_are_refused_by_name(payload, message):
    with pytest.raises(WireError, match=message):
        read_routed_experts(payload, GEOMETRY)


def test_a_pickled_npy_is_never_loaded():
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(WireError, match="dtype object"):
        read_routed_experts(base64.b64encode(stream.getvalue()).decode(), GEOMETRY)


def test_a_payload_larger_than_allowed_is_refused_before_it_is_decoded():
    with pytest.raises(WireError, match="more than 16 bytes allow"):
        read_routed_experts("A" * 64, GEOMETRY, max_bytes=16)


def test_counting_ids_by_hand():
    # layer 0: tokens chose {0,1} and {1,2}; layer 1: {2,3} and {3,0}
    np.testing.assert_array_equal(count_ids(np.array(GOOD), 4), [[1, 2, 1, 0], [1, 0, 1, 2]])


@given(st.integers(0, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_permuting_tokens_leaves_counts_and_permuting_experts_permutes_them(tokens, seed):
    rng = np.random.default_rng(seed)
    ids = random_ids(rng, tokens)
    counts = count_ids(ids, 4)
    np.testing.assert_array_equal(count_ids(rng.permutation(ids), 4), counts)
    renamed = rng.permutation(4)
    np.testing.assert_array_equal(count_ids(renamed[ids], 4)[:, renamed], counts)
