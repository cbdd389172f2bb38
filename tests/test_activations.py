from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from coterie.activations import ActivationTrace, TraceRecord, build_trace
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.errors import TraceError
from coterie.wire import count_ids
from traces import random_counts, random_ids, tiny_moe_trace

GEOMETRY = ModelGeometry(layers=2, experts=6, top_k=2)


def record(seed, *, tokens=7, covered=None, output_tokens=4, label=""):
    rng = np.random.default_rng(seed)
    output = random_counts(rng, max(output_tokens - 1, 0), GEOMETRY)
    return TraceRecord(
        random_counts(rng, tokens, GEOMETRY, covered=covered), output, output_tokens, prompt_hash([seed]), label
    )


@pytest.fixture
def trace():
    """Three requests: whole, partly counted, and one whose output was a single token."""
    return build_trace(
        "tiny", [record(0, label="code"), record(1, covered=5, label="fr"), record(2, output_tokens=1, label="code")]
    )


def with_ids(trace):
    """The trace with `decode_ids`, and the counts that belong to them."""
    rng = np.random.default_rng(0)
    ids = [random_ids(rng, int(n), GEOMETRY) for n in trace.decode_covered]
    decode = np.stack([count_ids(part, GEOMETRY.experts) for part in ids])
    return replace(trace, decode=decode, decode_ids=np.concatenate(ids))


def assert_equal(one, other):
    for field in fields(ActivationTrace):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


# --- making one ---------------------------------------------------------------------------------------


def test_records_become_a_trace(trace):
    assert len(trace) == 3
    assert trace.prefill.shape == trace.decode.shape == (3, 2, 6)
    assert trace.prefill_tokens.tolist() == [7, 7, 7]
    assert trace.prefill_covered.tolist() == [7, 5, 7]
    assert trace.decode_tokens.tolist() == [4, 4, 1]
    assert trace.decode_covered.tolist() == [3, 3, 0]
    assert trace.labels == ("code", "fr", "code")
    assert trace.complete.tolist() == [True, False, True]


@pytest.mark.parametrize(("most", "dtype"), [(255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)])
def test_one_dtype_holds_the_largest_count_of_all_requests(most, dtype):
    geometry = ModelGeometry(layers=1, experts=2, top_k=1)
    small = ExpertCounts(geometry, np.array([[1, 0]], np.uint8), 1, 1)
    large = ExpertCounts(geometry, np.array([[0, most]], np.uint32), most, most)
    trace = build_trace("m", [TraceRecord(small, small, 2, "0" * 32), TraceRecord(large, small, 2, "1" * 32)])
    assert trace.prefill.dtype == dtype
    assert trace.decode.dtype == np.uint8
    assert trace.prefill[1].tolist() == [[0, most]]


def test_no_records_and_mixed_geometries_are_refused():
    with pytest.raises(TraceError, match="no requests"):
        build_trace("m", [])
    other = ModelGeometry(layers=2, experts=8, top_k=2)
    counts = random_counts(np.random.default_rng(0), 3, other)
    with pytest.raises(TraceError, match="request 1 is of a model with 2 layers x 8 experts, top-2, request 0 with"):
        build_trace("m", [record(0), TraceRecord(counts, counts, 4, "0" * 32)])


# --- what a trace refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("model", lambda t: "", "the model's name is empty"),
        ("labels", lambda t: ("a",), "1 labels for 3 prompt hashes"),
        ("prompt_hashes", lambda t: (), "no requests"),
        ("prompt_hashes", lambda t: (*t.prompt_hashes[:2], "XY"), "request 2: prompt hash 'XY'"),
        ("prefill", lambda t: t.prefill[:, :1], r"prefill has shape \(3, 1, 6\), not \(3, 2, 6\)"),
        ("decode", lambda t: t.decode[:2], r"decode has shape \(2, 2, 6\)"),
        ("prefill", lambda t: t.prefill.astype(np.int16), "prefill has dtype int16"),
        ("prefill", lambda t: t.prefill.astype(np.uint64), "prefill has dtype uint64"),
        ("decode_tokens", lambda t: t.decode_tokens.astype(np.int32), "decode_tokens has dtype int32"),
        ("decode_tokens", lambda t: t.decode_tokens[:2], "decode_tokens has shape"),
        ("decode_tokens", lambda t: changed(t.decode_tokens, 2, -1), "request 2: decode_tokens is -1"),
        ("prefill_tokens", lambda t: changed(t.prefill_tokens, 1, 4), "request 1: prefill_covered is 5: more tokens"),
        ("prefill_tokens", lambda t: changed(t.prefill_tokens, 1, 1 << 62), "request 1: prefill_tokens is 46116860184"),
        ("decode_tokens", lambda t: changed(t.decode_tokens, 0, 3), "request 0: decode_covered is 3.*never forwarded"),
        ("prefill_covered", lambda t: changed(t.prefill_covered, 1, 4), "request 1: prefill: .*layer 0 sums to 10"),
        ("decode_covered", lambda t: changed(t.decode_covered, 0, 2), "request 0: decode: .*layer 0 sums to 6"),
        ("prefill", lambda t: changed(t.prefill, (2, 1), 0), "request 2: prefill: .*layer 1 sums to 0"),
        ("prefill", lambda t: changed(t.prefill, (0, 1), [14, 0, 0, 0, 0, 0]), "chosen 14 times by 7 tokens"),
        ("gate_prob", lambda t: np.zeros((3, 2, 5), np.float32), "gate_prob has shape"),
        ("gate_prob", lambda t: np.zeros((3, 2, 6)), "gate_prob has dtype float64"),
        ("gate_prob", lambda t: np.full((3, 2, 6), -1, np.float32), "negative sum of probabilities"),
        ("gate_logit", lambda t: np.full((3, 2, 6), np.nan, np.float32), "gate_logit holds a value that is not finite"),
    ],
)
def test_a_contradiction_is_named(trace, name, change, problem):
    with pytest.raises(TraceError, match=problem):
        replace(trace, **{name: change(trace)})


def test_a_prompt_of_which_nothing_was_counted_is_refused(trace):
    with pytest.raises(TraceError, match="request 1: prefill_covered is 0: nothing of the prompt was counted"):
        replace(trace, prefill=changed(trace.prefill, 1, 0), prefill_covered=changed(trace.prefill_covered, 1, 0))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda ids: ids[:-1], "decode_ids has shape"),
        (lambda ids: ids.astype(np.int32), "decode_ids has dtype int32"),
        (lambda ids: changed(ids, (4, 1, 0), 6), "request 1: decode_ids: .*token 1, layer 1 holds an id outside 0..5"),
        (lambda ids: changed(ids, (4, 1), [3, 3]), "request 1: decode_ids: .*the same expert twice"),
        (lambda ids: changed(ids, (4, 1), 0), "request 1: decode_ids: .*only zeros"),
        (lambda ids: (ids + 1) % 6, "request 0: decode_ids do not count to decode"),
    ],
)
def test_decode_ids_are_checked_and_must_count_to_decode(trace, change, problem):
    trace = with_ids(trace)
    with pytest.raises(TraceError, match=problem):
        replace(trace, decode_ids=change(trace.decode_ids))


# --- choosing requests --------------------------------------------------------------------------------


def test_selection_keeps_every_field_in_the_order_given(trace):
    chosen = with_ids(trace).select([1, 0])
    assert chosen.labels == ("fr", "code")
    assert chosen.prefill_covered.tolist() == [5, 7]
    assert chosen.prompt_hashes == (prompt_hash([1]), prompt_hash([0]))
    whole = with_ids(trace).decode_ids
    np.testing.assert_array_equal(chosen.decode_ids, np.concatenate([whole[3:6], whole[:3]]))


def test_selection_of_nothing_or_beyond_the_end_is_refused(trace):
    with pytest.raises(TraceError, match="no requests"):
        with_ids(trace).select([])
    for wrong in (3, -1):
        with pytest.raises(TraceError, match=f"no request {wrong} among 3"):
            trace.select([0, wrong])


@pytest.mark.parametrize("wrong", [np.array([True, False, True]), [0.5, 1.5], [[0, 1]], ["a"]])
def test_a_selection_by_anything_but_positions_is_refused(trace, wrong):
    with pytest.raises(TraceError, match=r"a list of whole numbers, .*np\.flatnonzero"):
        trace.select(wrong)


# --- files --------------------------------------------------------------------------------------------


def test_the_recorded_trace_survives_a_file(tmp_path):
    trace = tiny_moe_trace()
    trace.save(tmp_path / "trace")
    assert_equal(ActivationTrace.load(tmp_path / "trace"), trace)


def test_all_optional_fields_survive_a_file(trace, tmp_path):
    rng = np.random.default_rng(0)
    gates = rng.random((2, 3, 2, 6)).astype(np.float32)
    trace = replace(with_ids(trace), gate_prob=gates[0], gate_logit=-gates[1])
    trace.save(tmp_path / "trace")
    assert_equal(ActivationTrace.load(tmp_path / "trace"), trace)


@settings(max_examples=30)
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4), labels=st.lists(st.text(max_size=3), min_size=4))
def test_any_labels_survive_a_file(tmp_path_factory, seeds, labels):
    trace = build_trace("m", [record(seed, label=label) for seed, label in zip(seeds, labels, strict=False)])
    path = tmp_path_factory.mktemp("traces") / "trace"
    trace.save(path)
    assert_equal(ActivationTrace.load(path), trace)


def test_a_truncated_trace_is_refused_with_file_and_remedy(trace, tmp_path):
    path = tmp_path / "short.trace"
    trace.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceError, match=r"short.trace: truncated .*; record it with `coterie collect`"):
        ActivationTrace.load(path)


def test_an_inconsistent_file_is_refused(trace, tmp_path):
    path = tmp_path / "trace"
    trace.save(path)
    content = path.read_bytes()
    at = content.index(trace.prefill.tobytes())
    path.write_bytes(content[:at] + bytes([content[at] + 1]) + content[at + 1 :])
    with pytest.raises(TraceError, match=r"request 0: prefill: .*layer 0 sums to 15, not to 7 tokens"):
        ActivationTrace.load(path)


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("labels", np.array([0, 2, 0], np.uint32), "labels are not positions among the 2 label names"),
        ("labels", np.array([0, 1, 0]), "labels are not positions"),
        ("prompt_hashes", np.zeros((3, 8), np.uint8), r"prompt_hashes has shape \(3, 8\) uint8, not \(N, 16\) bytes"),
    ],
)
def test_a_file_whose_labels_or_hashes_are_malformed_is_refused(trace, tmp_path, name, array, problem):
    path = tmp_path / "trace"
    trace.save(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file(load_file(path) | {name: array}, path, metadata)
    with pytest.raises(TraceError, match=problem):
        ActivationTrace.load(path)


def test_a_file_with_an_impossible_geometry_is_refused(trace, tmp_path):
    path = tmp_path / "trace"
    trace.save(path)
    path.write_bytes(path.read_bytes().replace(rb"top_k\":2", rb"top_k\":9"))
    with pytest.raises(TraceError, match="top_k must be a whole number from 1 to 6"):
        ActivationTrace.load(path)


def test_equal_contents_have_one_digest_whatever_the_dtype(trace):
    assert replace(trace, prefill=trace.prefill.astype(np.uint32)).digest() == trace.digest()


def test_any_change_changes_the_digest(trace):
    swapped = trace.prefill[:, :, ::-1]
    others = [replace(trace, model="other"), replace(trace, labels=("a", "b", "c")), replace(trace, prefill=swapped)]
    others += [with_ids(trace), trace.select([0, 1])]
    assert len({other.digest() for other in [trace, *others]}) == 6


# --- optional arrays of single records ----------------------------------------------------------------


def rich(seed, *, output_tokens=4):
    """A record with ids of its output and gate sums of its prompt."""
    rng = np.random.default_rng(seed)
    ids = random_ids(rng, output_tokens - 1, GEOMETRY)
    output = ExpertCounts(GEOMETRY, count_ids(ids, GEOMETRY.experts), output_tokens - 1, output_tokens - 1)
    gates = rng.random((2, 6), dtype=np.float32)
    return TraceRecord(
        random_counts(rng, 7, GEOMETRY), output, output_tokens, prompt_hash([seed]), "", ids, gates, -gates
    )


def test_ids_and_gate_sums_are_joined_request_after_request():
    records = [rich(0), rich(1, output_tokens=1), rich(2, output_tokens=3)]
    trace = build_trace("m", records)
    np.testing.assert_array_equal(trace.decode_ids, np.concatenate([records[0].decode_ids, records[2].decode_ids]))
    np.testing.assert_array_equal(trace.gate_prob[2], records[2].gate_prob)
    np.testing.assert_array_equal(trace.gate_logit[0], records[0].gate_logit)


@pytest.mark.parametrize("name", ["decode_ids", "gate_prob", "gate_logit"])
def test_an_optional_array_that_one_record_lacks_is_an_error(name):
    with pytest.raises(TraceError, match=f"request 1 has no {name}, others have"):
        build_trace("m", [rich(0), replace(rich(1), **{name: None})])


def test_ids_that_do_not_fit_are_refused_before_they_wrap():
    wrong = rich(0).decode_ids.astype(np.int64)
    wrong[0, 0, 0] += 256
    with pytest.raises(TraceError, match=r"request 0: decode_ids: .* an id outside"):
        build_trace("m", [replace(rich(0), decode_ids=wrong)])
    with pytest.raises(TraceError, match=r"decode_ids has shape \(3, 4\)"):
        build_trace("m", [replace(rich(0), decode_ids=rich(0).decode_ids.reshape(3, 4))])


def test_gate_sums_of_several_shapes_are_refused():
    with pytest.raises(TraceError, match="gate sums of several shapes"):
        build_trace("m", [rich(0), replace(rich(1), gate_prob=np.zeros((3, 6), np.float32))])
