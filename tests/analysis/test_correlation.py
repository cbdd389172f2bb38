import numpy as np
import pytest

from coterie.analysis.correlation import correlations, members_of, prefill_decode_correlation, spread_of
from coterie.errors import InputError


def counts(rows):
    """`[N, 1, E]` counts."""
    return np.array(rows, dtype=np.uint16)[:, None]


def r_of(prefill, decode, labels=None, seed=0):
    labels = labels or ("",) * len(prefill)
    return prefill_decode_correlation(counts(prefill), counts(decode), labels, np.random.default_rng(seed))


def test_outputs_in_proportion_to_their_prompts_have_r_1_and_reversed_ones_minus_1():
    assert r_of([[1, 2, 3], [5, 1, 0]], [[2, 4, 6], [50, 10, 0]]).own.mean == pytest.approx(1)
    assert r_of([[1, 2, 3]], [[3, 2, 1]]).own.mean == pytest.approx(-1)


def test_r_is_the_one_computed_by_hand():
    # prefill less its mean: -1 0 1; decode less its mean: 0 -1 1; product 1, lengths sqrt 2 each
    assert r_of([[1, 2, 3]], [[2, 1, 3]]).own.mean == pytest.approx(0.5)


def test_the_control_pairs_no_request_with_itself_and_uses_each_once_on_each_side():
    # 9 requests, each with an expert of its own: own r is 1; any two requests have (0 - 1/81) / (8/81) = -1/8
    found = r_of(np.eye(9), np.eye(9))
    assert (found.own.mean, found.own.count) == (pytest.approx(1), 9)
    assert (found.other.mean, found.other.deviation, found.other.count) == (pytest.approx(-1 / 8), pytest.approx(0), 9)
    assert found.same_domain is None


def test_the_control_within_a_domain_leaves_out_labels_of_one_request_and_requests_without_a_label():
    prefill = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    found = r_of(prefill, prefill, ("a", "a", "b", "b", "lone", ""))
    assert (found.same_domain.mean, found.same_domain.count) == (pytest.approx(1), 4)


def test_a_request_that_used_all_experts_alike_has_no_r():
    found = r_of([[1, 2], [3, 3]], [[1, 2], [1, 2]])
    assert found.own.count == 1
    with pytest.raises(InputError, match="no request used some experts more than others"):
        r_of([[3, 3]], [[1, 2]])


def test_a_single_request_has_no_control():
    assert r_of([[1, 2, 0]], [[1, 2, 0]]).other is None


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(InputError, match="correlation"):
        r_of([[1, 2]], [[1, 2]], ("a", "b"))


def test_r_is_numpys_for_more_rows_than_a_block():
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 50, (300, 2, 5)), rng.integers(0, 50, (300, 2, 5))
    rows, partners = rng.permutation(300), rng.permutation(300)
    expected = [np.corrcoef(left[rows[n]].ravel(), right[partners[n]].ravel())[0, 1] for n in range(250, 300)]
    assert correlations(left, right, rows, partners)[250:] == pytest.approx(expected)


def test_the_order_of_experts_and_layers_does_not_matter():
    rng = np.random.default_rng(1)
    prefill, decode = (rng.integers(0, 9, (6, 3, 4)).astype(np.uint8) for _ in range(2))
    order = rng.permutation(12)
    mixed = [values.reshape(6, 12)[:, order].reshape(6, 3, 4) for values in (prefill, decode)]
    labels = ("a", "b") * 3
    found, again = (
        prefill_decode_correlation(*sides, labels, np.random.default_rng(2)) for sides in ((prefill, decode), mixed)
    )
    assert again.own.mean == pytest.approx(found.own.mean)
    assert again.same_domain.mean == pytest.approx(found.same_domain.mean)


def test_members_are_listed_by_label_in_alphabetical_order():
    found = members_of(("b", "", "a", "b"))
    assert {name: list(members) for name, members in found.items()} == {"a": [2], "b": [0, 3]}
    assert list(found) == ["a", "b"]


def test_a_spread_is_of_the_values_that_are_numbers():
    found = spread_of(np.array([1.0, np.nan, 3.0]))
    assert (found.mean, found.deviation, found.low, found.high, found.count) == (2, 1, pytest.approx(1.1), 2.9, 2)
    assert spread_of(np.array([np.nan])) is None
