from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.signature import COUNT_KINDS, KINDS, SignatureTransform, fit_idf

GEOMETRY = ModelGeometry(layers=3, experts=4, top_k=2)
SOME_COUNTS = arrays(np.uint16, (5, 3, 4), elements=st.integers(0, 1000))
EVERY_LAYER = (0, 1, 2)


def transform(layers=EVERY_LAYER, idf=None):
    idf = np.ones((3, 4)) if idf is None else idf
    return SignatureTransform(GEOMETRY, layers, idf=np.asarray(idf, np.float32))


def of_kind(kind):
    """The transform of this kind over all layers, with IDF weights of 1 where it takes any."""
    return SignatureTransform(GEOMETRY, EVERY_LAYER, kind, np.ones((3, 4), np.float32) if kind == "count_idf" else None)


def test_idf_by_hand():
    counts = np.array([[[5, 1, 0]], [[2, 0, 0]], [[9, 0, 0]]], np.uint16)  # 3 requests, 1 layer, 3 experts
    # expert 0 used by 3 of 3: ln(4/4) = 0; expert 1 by one: ln(4/2); expert 2 by none: ln(4/1)
    np.testing.assert_allclose(fit_idf(counts), [[0, log(2), log(4)]], rtol=1e-6)


@given(SOME_COUNTS)
def test_idf_is_never_negative_and_falls_with_use(counts):
    weights = fit_idf(counts)
    assert weights.min() >= 0
    used = (counts > 0).sum(0).ravel()
    assert (np.diff(weights.ravel()[np.argsort(used)]) <= 0).all()


def test_signature_by_hand():
    idf = np.zeros((3, 4))
    idf[0, 0], idf[2, 1], idf[2, 3] = 2, 1, 0.5
    counts = np.zeros((3, 4), np.uint8)
    counts[0, 0], counts[1, 2], counts[2, 1], counts[2, 3] = 1, 7, 2, 2
    # kept layers 0 and 2: (1*2, 0, 0, 0, 0, 2*1, 0, 2*0.5) = (2, ..., 2, 0, 1) of length 3
    signature = transform((0, 2), idf).apply(counts)
    np.testing.assert_allclose(signature, [2 / 3, 0, 0, 0, 0, 2 / 3, 0, 1 / 3], rtol=1e-6)


def test_one_norm_spans_all_layers():
    counts = np.zeros((3, 4), np.uint8)
    counts[:, 0] = 6
    np.testing.assert_allclose(transform().apply(counts)[::4], [1 / sqrt(3)] * 3, rtol=1e-6)


@given(SOME_COUNTS, st.sets(st.integers(0, 2), min_size=1))
def test_rows_are_unit_or_zero_and_many_at_once_equal_one_by_one(counts, layers):
    chosen = transform(tuple(sorted(layers)), np.arange(12).reshape(3, 4))
    rows = chosen.apply(counts)
    assert rows.shape == (5, chosen.dimensions)
    assert rows.dtype == np.float32
    for row, one in zip(rows, counts, strict=True):
        np.testing.assert_array_equal(row, chosen.apply(one))
        assert np.linalg.norm(row) == pytest.approx(1, abs=1e-6) or not row.any()


@given(SOME_COUNTS)
def test_a_mask_equals_leaving_the_other_layers_out(counts):
    smaller = SignatureTransform(ModelGeometry(2, 4, 2), (0, 1), idf=np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(transform((0, 2)).apply(counts), smaller.apply(counts[:, [0, 2]]))


def test_counts_are_left_as_they_were():
    counts = np.ones((3, 4), np.uint16)
    transform().apply(counts)
    assert counts.tolist() == np.ones((3, 4)).tolist()


def test_a_request_of_worthless_experts_has_a_zero_row():
    idf = np.zeros((3, 4))
    idf[0, 0] = 1
    counts = np.zeros((3, 4), np.uint8)
    counts[:, 1] = 4
    assert transform(EVERY_LAYER, idf).apply(counts).tolist() == [0] * 12
    assert transform(EVERY_LAYER, idf).apply(counts[None]).tolist() == [[0] * 12]


def test_counts_of_a_million_token_prompt_keep_their_direction():
    counts = np.zeros((3, 4), np.uint32)
    counts[0, :2] = 3_000_000, 4_000_000
    np.testing.assert_allclose(transform().apply(counts)[:2], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 4), (2, 3, 3, 4), (3, 4, 1)])
def test_counts_of_another_geometry_are_refused(shape):
    with pytest.raises(InputError, match="are not of 3 layers x 4 experts, top-2"):
        transform().apply(np.ones(shape, np.uint8))


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (0, 3), (-1, 0)])
def test_layers_must_be_ascending_distinct_and_present(layers):
    with pytest.raises(InputError, match="are not ascending, distinct whole numbers from 0 to 2"):
        transform(layers)


@pytest.mark.parametrize(
    ("idf", "problem"),
    [
        (np.ones((2, 4)), "idf has shape"),
        (np.full((3, 4), np.nan), "negative or not finite"),
        (np.full((3, 4), -1), "negative or not finite"),
        (np.zeros((3, 4)), "all idf weights of the kept layers are 0"),
    ],
)
def test_bad_weights_are_refused(idf, problem):
    with pytest.raises(InputError, match=problem):
        transform(EVERY_LAYER, idf)


def test_weights_of_dropped_layers_alone_are_not_enough():
    idf = np.zeros((3, 4))
    idf[1] = 1
    with pytest.raises(InputError, match="kept layers are 0"):
        transform((0, 2), idf)


# --- the six kinds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        ("count", [9, 0, 4, 1]),
        ("sqrt", [3, 0, 2, 1]),
        ("binary", [1, 0, 1, 1]),
        ("count_idf", [4.5, 0, 8, 0]),
    ],
)
def test_what_is_made_of_counts_by_hand(kind, features):
    geometry = ModelGeometry(layers=1, experts=4, top_k=2)
    idf = np.array([[0.5, 1, 2, 0]], np.float32) if kind == "count_idf" else None
    made = SignatureTransform(geometry, (0,), kind, idf)
    assert made.reads == "counts"
    counts = np.array([[9, 0, 4, 1]], np.uint16)
    np.testing.assert_allclose(made.features(counts), [features], rtol=1e-6)
    np.testing.assert_allclose(made.apply(counts), features / np.linalg.norm(features), rtol=1e-6)


def test_gate_sums_are_taken_as_they_are_negative_ones_too():
    sums = np.zeros((2, 3, 4), np.float32)
    sums[0, 1, :2] = 3, -4
    for kind in ("gate_prob", "gate_logit"):
        made = of_kind(kind)
        assert made.reads == kind
        np.testing.assert_array_equal(made.features(sums), sums)
        np.testing.assert_allclose(made.apply(sums)[0, 4:6], [0.6, -0.8], rtol=1e-6)
        assert not made.apply(sums)[1].any()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_gate_sums_of_any_size_have_a_direction(size):
    sums = np.full((2, 3, 4), -size, dtype=np.float32)
    np.testing.assert_allclose(of_kind("gate_logit").apply(sums), np.full((2, 12), -1 / sqrt(12)), rtol=1e-6)


def test_layers_may_be_whole_numbers_of_numpy_but_nothing_else():
    made = SignatureTransform(GEOMETRY, tuple(np.flatnonzero([1, 0, 1])), "count")
    assert made.layers == (0, 2)
    assert {type(layer) for layer in made.layers} == {int}
    for wrong in ((0.0, 2.0), ("0",), (None,)):
        with pytest.raises(InputError, match="are not ascending, distinct whole numbers"):
            SignatureTransform(GEOMETRY, wrong, "count")


@given(SOME_COUNTS, st.sampled_from(KINDS), st.permutations(range(5)))
def test_permuting_requests_permutes_rows_of_every_kind(counts, kind, order):
    values = counts if kind in COUNT_KINDS else counts.astype(np.float32) - 500
    rows = of_kind(kind).apply(values)
    np.testing.assert_array_equal(of_kind(kind).apply(values[order]), rows[order])
    lengths = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(lengths, values.any(axis=(1, 2)), atol=1e-6)


def test_features_are_of_the_kept_layers_and_leave_the_values_alone():
    counts = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    features = SignatureTransform(GEOMETRY, (0, 2), "sqrt").features(counts)
    np.testing.assert_allclose(features, np.sqrt(counts[:, [0, 2]]), rtol=1e-6)
    assert counts.ravel().tolist() == list(range(24))


def test_counts_and_gate_sums_are_not_taken_for_one_another():
    with pytest.raises(InputError, match="sqrt reads counts, got values of dtype float32"):
        of_kind("sqrt").apply(np.ones((3, 4), np.float32))
    with pytest.raises(InputError, match="gate_prob reads gate_prob, got values of dtype uint8"):
        of_kind("gate_prob").apply(np.ones((3, 4), np.uint8))


def test_only_count_idf_takes_weights():
    with pytest.raises(InputError, match="kind count_idf takes idf weights"):
        SignatureTransform(GEOMETRY, EVERY_LAYER)
    with pytest.raises(InputError, match="kind binary takes no idf"):
        SignatureTransform(GEOMETRY, EVERY_LAYER, "binary", np.ones((3, 4), np.float32))


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="no kind 'tfidf'; one of count_idf, count, sqrt, binary, gate_prob, gate_log"):
        SignatureTransform(GEOMETRY, EVERY_LAYER, "tfidf")


@pytest.mark.parametrize("kind", COUNT_KINDS)
def test_similarities_are_the_products_with_the_signature(kind):
    rng = np.random.default_rng(1)
    made, counts = of_kind(kind), np.random.default_rng(2).integers(0, 5, (3, 4)).astype(np.uint16)
    vectors = rng.random((6, made.dimensions)).astype(np.float32)
    np.testing.assert_allclose(made.similarities(counts, vectors), vectors @ made.apply(counts), rtol=1e-5)
    assert made.similarities(np.zeros((3, 4), np.uint16), vectors) is None
    wide = vectors.astype(np.float64)
    np.testing.assert_allclose(made.similarities(counts, wide), vectors @ made.apply(counts), rtol=1e-5)
    for wrong in ((counts[:2], vectors), (counts, vectors[:, 1:])):
        with pytest.raises(InputError, match="are not of"):
            made.similarities(*wrong)
