import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import rankdata, spearmanr

from coterie import quality
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.quality import (
    Rho,
    cosines,
    random_pairs,
    select_layers,
    signature_quality,
    spearman,
    unit_rows,
    within_labels,
)
from coterie.signature import COUNT_KINDS, SignatureTransform, fit_idf
from traces import tiny_moe_trace

FEW = st.integers(0, 3)
TRACE_PAIRS = random_pairs(768, 30_000, np.random.default_rng(1))


def rng(seed=0):
    return np.random.default_rng(seed)


def all_pairs(requests):
    return random_pairs(requests, requests**2, rng())


# --- pairs --------------------------------------------------------------------------------------------


def test_all_pairs_where_there_are_no_more_than_asked_for():
    assert random_pairs(4, 6, rng()).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert random_pairs(4, 7, rng()).tolist() == random_pairs(4, 6, rng()).tolist()
    assert random_pairs(2, 9, rng()).tolist() == [[0, 1]]


@pytest.mark.parametrize("requests", [0, 1])
def test_fewer_than_two_requests_make_no_pairs(requests):
    assert random_pairs(requests, 5, rng()).shape == (0, 2)


@given(st.integers(2, 400), st.integers(0, 200), st.integers(0, 9))
def test_pairs_are_different_ordered_and_as_many_as_asked_for(requests, pairs, seed):
    drawn = random_pairs(requests, pairs, rng(seed))
    assert drawn.dtype == np.int64
    assert len(drawn) == min(pairs, requests * (requests - 1) // 2)
    i, j = drawn.T
    assert ((i >= 0) & (i < j) & (j < requests)).all()
    assert len({tuple(pair) for pair in drawn.tolist()}) == len(drawn)


def test_every_pair_is_drawn_equally_often():
    rngs = rng(7)
    drawn = np.concatenate([random_pairs(5, 4, rngs) for _ in range(5000)])
    often = np.unique(drawn, axis=0, return_counts=True)[1]
    # 4 of 10 pairs, 5,000 times: 2,000 each, give or take sqrt(5000 * 0.4 * 0.6) = 35
    assert len(often) == 10
    assert abs(often - 2000).max() < 140


def test_pairs_of_a_million_requests_are_drawn_without_listing_all():
    i, j = random_pairs(1_000_000, 100, rng()).T
    assert ((i < j) & (j < 1_000_000)).all()


def test_numbers_of_requests_and_pairs_cannot_be_negative():
    with pytest.raises(InputError, match="-1 pairs of 4 requests"):
        random_pairs(4, -1, rng())
    with pytest.raises(InputError, match="4 pairs of -1 requests"):
        random_pairs(-1, 4, rng())


def test_pairs_within_labels_leave_out_requests_without_one():
    labels = ("code", "fr", "", "code", "")
    pairs = all_pairs(5)
    assert pairs[within_labels(labels, pairs)].tolist() == [[0, 3]]


@pytest.mark.parametrize("pairs", [[[0, 3]], [[-1, 2]], [[1, 1]]])
def test_a_pair_that_is_not_of_two_requests_is_refused(pairs):
    problem = rf"pair \({pairs[0][0]}, {pairs[0][1]}\) is not of two different requests from 0 to 2"
    with pytest.raises(InputError, match=problem):
        cosines(np.ones((3, 2), np.float32), np.array(pairs))
    with pytest.raises(InputError, match=problem):
        within_labels("abc", np.array(pairs))


@pytest.mark.parametrize("pairs", [np.zeros((2, 3), np.int64), np.zeros(2, np.int64), np.zeros((1, 2))])
def test_an_array_that_holds_no_pairs_is_refused(pairs):
    with pytest.raises(InputError, match=r"are not \[P, 2\] whole numbers"):
        cosines(np.ones((3, 2), np.float32), pairs)


# --- rows and cosines ---------------------------------------------------------------------------------


def test_unit_rows_by_hand():
    values = np.zeros((3, 2, 2), np.uint16)
    values[0, :, 0] = 3, 4
    values[1, 1, 1] = 7
    np.testing.assert_allclose(unit_rows(values), [[0.6, 0, 0.8, 0], [0, 0, 0, 1], [0, 0, 0, 0]], rtol=1e-6)


def test_cosines_by_hand():
    rows = np.array([[3, 4, 0], [4, 3, 0], [0, 0, 2], [0, 0, 0], [-6, -8, 0]], np.float32)
    # (3, 4) . (4, 3) / 25 = 0.96; a zero row has no direction
    expected = {(0, 1): 0.96, (0, 2): 0, (0, 3): 0, (0, 4): -1, (2, 3): 0}
    np.testing.assert_allclose(cosines(rows, np.array(list(expected))), list(expected.values()), atol=2**-30)


@pytest.mark.parametrize("most", [9, 255, 60_000, 4_000_000_000])
@pytest.mark.parametrize("columns", [1, 64, 700])
def test_cosines_equal_the_definition_in_float64(most, columns):
    whole = (most * rng().random((6, columns)) ** 3).astype(np.min_scalar_type(most))
    pairs = all_pairs(6)
    for rows in (whole, (whole - most / 3).astype(np.float32)):
        exact = rows.astype(np.float64)
        norms = np.maximum(np.linalg.norm(exact, axis=1), 1e-9)
        expected = (exact @ exact.T / norms / norms[:, None])[tuple(pairs.T)]
        np.testing.assert_allclose(cosines(rows, pairs), expected, rtol=0, atol=2**-30)


def test_cosines_that_are_equal_but_for_the_order_of_a_sum_are_equal():
    shuffled = rng(3).random((1, 4096)).astype(np.float32)
    rows = np.concatenate([np.roll(shuffled, 17 * k, axis=1) for k in range(40)])
    apart = np.array([(k, k + 1) for k in range(39)])  # all the same vectors, rotated
    assert len(set(cosines(rows, apart).tolist())) == 1


def test_rows_of_one_direction_have_a_cosine_of_exactly_one():
    rows = np.repeat(rng(6).random((30, 50)).astype(np.float32), 2, axis=0)
    rows[1::2] *= 3
    assert set(cosines(rows, np.arange(60).reshape(30, 2)).tolist()) == {1}


def test_a_value_that_is_not_finite_is_refused():
    rows = np.ones((3, 4), np.float32)
    rows[1, 2] = np.nan
    with pytest.raises(InputError, match="request 1 holds a value that is not finite"):
        cosines(rows, all_pairs(3))


# --- rank correlation ---------------------------------------------------------------------------------


def test_spearman_by_hand():
    # ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * (1 + 1 + 1 + 1) / (4 * 15) = 0.6
    assert spearman(np.array([1, 2, 3, 4]), np.array([20, 10, 40, 30])) == pytest.approx(0.6)


@settings(max_examples=30)
@given(st.integers(2, 60), st.integers(1, 12), st.integers(0, 999))
def test_spearman_equals_scipy_with_ties_and_without(size, values, seed):
    chance = rng(seed)
    a, b = chance.integers(values, size=size), chance.random(size)
    if len(set(a)) == 1:
        assert math.isnan(spearman(a, b))
    else:
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 999))
def test_a_rising_function_of_distances_changes_nothing(size, seed):
    chance = rng(seed)
    a, b = chance.integers(10, size=size) / 10, chance.random(size)
    for changed in (np.exp(a), a**3, 7 * a - 100):
        np.testing.assert_equal(spearman(changed, b), spearman(a, b))
        np.testing.assert_equal(spearman(b, changed), spearman(a, b))
    np.testing.assert_equal(spearman(-a, -b), spearman(a, b))


@pytest.mark.parametrize("size", [0, 1, 5])
def test_without_variation_there_is_no_correlation(size):
    assert math.isnan(spearman(np.ones(size), np.arange(size)))


def test_lists_that_cannot_be_ranked_are_refused():
    with pytest.raises(InputError, match=r"lists of shape \(2,\) and \(3,\)"):
        spearman(np.ones(2), np.ones(3))
    with pytest.raises(InputError, match="to be ranked is not finite"):
        spearman(np.array([1, np.nan]), np.ones(2))


@settings(max_examples=30)
@given(arrays(np.uint32, st.integers(1, 60), elements=st.integers(0, 2**31) | FEW))
def test_keys_are_sorted_as_numbers_are(keys):
    np.testing.assert_array_equal(quality._key_order(keys), np.argsort(keys, kind="stable"))


# --- quality ------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(3, 30), st.integers(0, 999))
def test_rho_is_spearman_of_the_cosines(requests, seed):
    chance = rng(seed)
    signatures, decode = chance.random((requests, 5)).astype(np.float32), chance.integers(0, 9, (requests, 2, 3))
    pairs = random_pairs(requests, 50, chance)
    found = signature_quality(signatures, decode.astype(np.uint8), pairs, chance, resamples=2)
    np.testing.assert_equal(found.value, spearman(cosines(signatures, pairs), cosines(decode.astype(np.uint8), pairs)))
    assert found.pairs == len(pairs)
    assert found.requests == len(np.unique(pairs))


@settings(max_examples=30)
@given(arrays(np.int64, 12, elements=FEW), st.integers(0, 999))
def test_weighted_rho_is_that_of_pairs_repeated(weights, seed):
    chance = rng(seed)
    a, b = chance.integers(5, size=12).astype(np.uint32), chance.integers(9, size=12).astype(np.uint32)
    found = quality._weighted(quality._Side.of(a), quality._Side.of(b), weights)
    expected = spearman(np.repeat(a, weights), np.repeat(b, weights))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def made_up(chance, requests):
    """Signatures and decode counts of requests of six domains, alike within a domain and each with noise of its own."""
    centres = np.random.default_rng(5).gamma(0.5, size=(6, 12)) + 0.05
    activity = centres[chance.integers(6, size=requests)] * chance.gamma(2, 0.5, (requests, 12))
    return activity * chance.gamma(1, 1, activity.shape), activity * chance.gamma(1, 1, activity.shape)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    chance = rng(11)
    pairs = random_pairs(2000, 100_000, chance)
    truth = spearman(*(cosines(values, pairs) for values in made_up(chance, 2000)))
    found = [signature_quality(*made_up(chance, 50), all_pairs(50), chance, resamples=60) for _ in range(60)]
    covered = np.mean([rho.low <= truth <= rho.high for rho in found])
    width = np.mean([rho.high - rho.low for rho in found])
    needed = 2 * 1.96 * np.std([rho.value for rho in found])
    assert covered >= 0.87  # 0.95, give or take 2 * sqrt(0.95 * 0.05 / 60) = 0.06, less some bias of few resamples
    assert 0.75 * needed < width < 1.35 * needed
    assert width > 1.5 * 2 * 1.96 / math.sqrt(1225)  # what 1,225 independent pairs would give is far too narrow


def test_the_same_chance_gives_the_same_interval_and_other_chance_the_same_value():
    signatures, decode = made_up(rng(1), 40)
    first, again, other = (signature_quality(signatures, decode, all_pairs(40), rng(seed)) for seed in (3, 3, 4))
    assert first == again
    assert first.value == other.value
    assert first != other
    assert -1 <= first.low < first.value < first.high <= 1


def test_requests_outside_the_pairs_do_not_matter():
    signatures, decode = made_up(rng(1), 40)
    some = np.arange(10, 30)
    inside = signature_quality(signatures[some], decode[some], all_pairs(20), rng())
    assert signature_quality(signatures, decode, some[all_pairs(20)], rng()) == inside
    assert inside.requests == 20


@settings(max_examples=30)
@given(st.permutations(range(8)), st.permutations(range(6)))
def test_permuting_requests_or_experts_leaves_rho(requests, experts):
    chance = rng(2)
    signatures, decode = chance.integers(0, 4, (2, 8, 6)).astype(np.uint8)
    pairs = all_pairs(8)
    expected = signature_quality(signatures, decode, pairs, rng(), resamples=1).value
    to = np.argsort(requests)  # request i moves to row to[i]
    moved = signature_quality(signatures[requests], decode[requests], to[pairs], rng(), resamples=1)
    other = signature_quality(signatures[:, experts], decode[:, experts], pairs, rng(), resamples=1)
    assert moved.value == other.value == expected


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_rho_of_fewer_than_two_pairs_is_not_defined(requests):
    values = rng().random((requests, 4)).astype(np.float32)
    found = signature_quality(values, values, all_pairs(requests), rng())
    assert (found.pairs, found.requests) == (requests // 2, requests // 2 * 2)
    assert all(map(math.isnan, (found.value, found.low, found.high)))


@pytest.mark.parametrize("alike", [np.zeros((9, 4), np.uint8), np.full((9, 4), 7, np.uint8)])
def test_rho_of_requests_that_are_all_alike_is_not_defined(alike):
    different = rng().integers(0, 9, (9, 4)).astype(np.uint8)
    for signatures, decode in ((alike, different), (different, alike)):
        assert math.isnan(signature_quality(signatures, decode, all_pairs(9), rng()).value)


def test_three_requests_tell_nothing():
    values = np.array([[1, 0], [1, 1], [0, 1]], np.float32)
    values[1] *= (1, 0.5)
    found = signature_quality(values, values, all_pairs(3), rng())
    assert found == Rho(value=1, low=-1, high=1, pairs=3, requests=3)


def test_unlike_requests_and_no_resamples_are_refused():
    with pytest.raises(InputError, match="signatures of 3 requests, decode counts of 4"):
        signature_quality(np.ones((3, 2)), np.ones((4, 2)), all_pairs(3), rng())
    with pytest.raises(InputError, match="0 resamples give no interval"):
        signature_quality(np.ones((3, 2)), np.ones((3, 2)), all_pairs(3), rng(), resamples=0)


# --- layer selection ----------------------------------------------------------------------------------


def naive_selection(features, decode, pairs):
    """ELDR's greedy selection, every trial from its signatures: average ranks by scipy, Pearson on them."""
    exact = features.astype(np.float64)
    target = rankdata(cosines(decode, pairs))

    def rho(layers):
        found = rankdata(cosines(exact[:, layers].reshape(len(exact), -1), pairs))
        if np.ptp(found) == 0 or np.ptp(target) == 0:
            return math.nan
        return float(np.corrcoef(found, target)[0, 1])

    order, curve = [], []
    left = list(range(features.shape[1]))
    while left:
        best, best_rho = left[0], -math.inf
        for layer in left:
            if (trial := rho(sorted([*order, layer]))) > best_rho + 1e-12:
                best, best_rho = layer, trial
        order.append(best)
        left.remove(best)
        curve.append(best_rho if best_rho > -math.inf else math.nan)
    return order, curve


@settings(max_examples=50)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 4), st.integers(2, 40), st.integers(0, 9999))
def test_selection_equals_trying_everything_ties_and_all(requests, layers, experts, most, seed):
    chance = rng(seed)
    features = chance.integers(0, most, (requests, layers, experts)).astype(np.float32)
    decode = chance.integers(0, 5, (requests, layers, experts)).astype(np.uint8)
    pairs = all_pairs(requests)
    found = select_layers(features, decode, pairs)
    order, curve = naive_selection(features, decode, pairs)
    assert list(found.order) == order
    np.testing.assert_allclose(found.curve, curve, atol=1e-12)


@settings(max_examples=30)
@given(st.integers(3, 20), st.integers(1, 6), st.integers(0, 999))
def test_the_curve_is_rho_of_the_layers_taken_and_cut_at_its_first_maximum(requests, layers, seed):
    chance = rng(seed)
    features = chance.normal(size=(requests, layers, 3)).astype(np.float32)
    decode = chance.integers(0, 9, (requests, 4)).astype(np.uint8)
    pairs = all_pairs(requests)
    found = select_layers(features, decode, pairs)
    assert sorted(found.order) == list(range(layers))
    for n, rho in enumerate(found.curve):
        taken = features[:, sorted(found.order[: n + 1])]
        np.testing.assert_allclose(spearman(cosines(taken, pairs), cosines(decode, pairs)), rho, atol=1e-6)
    peak = found.curve.index(max(found.curve))
    assert found.layers == tuple(sorted(found.order[: peak + 1]))
    assert found.rho == max(found.curve)


def test_a_layer_that_tells_nothing_is_cut():
    chance = rng(4)
    decode = chance.integers(0, 30, (40, 2, 6)).astype(np.uint8)
    noise = chance.integers(0, 300, (40, 1, 6))
    features = np.concatenate([noise, decode[:, :1], noise[::-1], decode[:, 1:]], axis=1).astype(np.float32)
    found = select_layers(features, decode, all_pairs(40))
    assert found.layers == (1, 3)
    assert found.rho == 1
    assert found.order[2:] in ((0, 2), (2, 0))


@settings(max_examples=20)
@given(st.permutations(range(12)), st.permutations(range(4)), st.permutations(range(5)), st.integers(0, 99))
def test_permuting_requests_layers_or_experts_permutes_the_selection(requests, layers, experts, seed):
    chance = rng(seed)
    features = chance.integers(0, 50, (12, 4, 5)).astype(np.float32)
    decode = chance.integers(0, 50, (12, 4, 5)).astype(np.uint8)
    pairs = all_pairs(12)
    found = select_layers(features, decode, pairs)
    moved = np.argsort(requests)[pairs]
    assert select_layers(features[requests], decode[requests], moved) == found
    assert select_layers(features[..., experts], decode[..., experts], pairs) == found
    other = select_layers(features[:, layers], decode[:, layers], pairs)
    assert other.curve == found.curve
    assert tuple(layers[n] for n in other.order) == found.order


def test_equal_layers_are_taken_in_their_order():
    layer = rng(1).integers(0, 9, (10, 1, 4))
    features = np.repeat(layer, 3, axis=1).astype(np.float32)
    found = select_layers(features, layer.astype(np.uint8), all_pairs(10))
    assert found.order == (0, 1, 2)
    assert found.layers == (0,)


@pytest.mark.parametrize("requests", [1, 2, 6])
def test_where_no_correlation_is_defined_all_layers_are_kept(requests):
    alike = np.ones((requests, 3, 2), np.float32)
    found = select_layers(alike, alike, all_pairs(requests))
    assert found.layers == found.order == (0, 1, 2)
    assert math.isnan(found.rho)
    assert all(map(math.isnan, found.curve))


def test_a_zero_layer_is_taken_after_any_that_varies():
    features = rng(2).integers(0, 9, (8, 2, 4)).astype(np.float32)
    features[:, 0] = 0
    found = select_layers(features, features[:, 1].astype(np.uint8), all_pairs(8))
    assert found.order == (1, 0)
    assert found.layers == (1,)


def test_features_that_are_none_are_refused():
    for shape in ((4, 3), (4, 0, 3), (4, 3, 0)):
        with pytest.raises(InputError, match=r"are not \[N, L, E\]"):
            select_layers(np.ones(shape, np.float32), np.ones((4, 3), np.uint8), all_pairs(4))
    with pytest.raises(InputError, match="signatures of 3 requests, decode counts of 4"):
        select_layers(np.ones((3, 2, 2), np.float32), np.ones((4, 2, 2), np.uint8), all_pairs(3))


# --- the recorded trace -------------------------------------------------------------------------------


def of_kind(kind, layers=(0, 1, 2, 3, 4)):
    idf = fit_idf(tiny_moe_trace().prefill) if kind == "count_idf" else None
    return SignatureTransform(ModelGeometry(5, 64, 4), layers, kind, idf)


@pytest.mark.parametrize(("kind", "rho"), [("count", 0.77), ("count_idf", 0.73), ("binary", 0.53)])
def test_rho_of_the_recorded_trace(kind, rho):
    trace = tiny_moe_trace()
    found = signature_quality(of_kind(kind).apply(trace.prefill), trace.decode, TRACE_PAIRS, rng(), resamples=20)
    assert found.value == pytest.approx(rho, abs=0.015)
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.1


@pytest.mark.parametrize("kind", COUNT_KINDS)
def test_selected_layers_of_the_recorded_trace_foretell_at_least_as_well_as_all(kind):
    trace = tiny_moe_trace()
    selection = select_layers(of_kind(kind).features(trace.prefill), trace.decode, TRACE_PAIRS)
    signatures = of_kind(kind, selection.layers).apply(trace.prefill)
    rho = spearman(cosines(signatures, TRACE_PAIRS), cosines(trace.decode, TRACE_PAIRS))
    assert rho == pytest.approx(selection.rho, abs=1e-5)
    assert selection.rho >= selection.curve[-1]
