import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.activations import TraceRecord, build_trace
from coterie.calibration import fit, values_of
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.errors import InputError
from coterie.quality import cosines, spearman
from coterie.signature import KINDS, SignatureTransform, fit_idf
from traces import random_counts, tiny_moe_trace

GROUPS = 8
PAIRS = 3000  # a tenth of the default, for speed
GEOMETRY = ModelGeometry(2, 8, 2)


def small_trace(labels, *, seed=0, output=3, **changes):
    """Random requests with 5 prompt tokens each, and gate sums."""
    rng = np.random.default_rng(seed)
    records = [
        TraceRecord(
            random_counts(rng, 5, GEOMETRY),
            random_counts(rng, output, GEOMETRY),
            output + 1,
            prompt_hash([i]),
            label,
            gate_prob=rng.random((2, 8), np.float32),
            gate_logit=rng.normal(size=(2, 8)).astype(np.float32),
        )
        for i, label in enumerate(labels)
    ]
    return replace(build_trace("m", records), **changes)


def one_expert_each(*chosen):
    """Requests whose five prompt tokens and output tokens all take one expert of the only layer."""
    geometry = ModelGeometry(1, 4, 1)
    records = []
    for i, expert in enumerate(chosen):
        counts = np.zeros((1, 4), np.uint8)
        counts[0, expert] = 5
        records.append(
            TraceRecord(ExpertCounts(geometry, counts, 5, 5), ExpertCounts(geometry, counts, 5, 5), 6, prompt_hash([i]))
        )
    return build_trace("m", records)


# --- on the recorded trace ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half():
    """Half of the recorded trace, drawn at random."""
    return tiny_moe_trace().select(np.random.default_rng(0).permutation(768)[:384])


@pytest.fixture(scope="module")
def profile(half):
    return fit(half, GROUPS, pairs=PAIRS)


def test_the_same_seed_gives_the_same_bytes(half, tmp_path):
    for name in ("one", "two"):
        fit(half, GROUPS, seed=3, starts=2, pairs=PAIRS).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


SCRIPT = """
import sys
from coterie.activations import ActivationTrace
from coterie.calibration import fit
fit(ActivationTrace.load(sys.argv[1]), 4, starts=2, pairs=2000).save(sys.argv[2])
"""


def test_any_number_of_threads_gives_the_same_bytes(half, tmp_path):
    half.save(tmp_path / "trace")
    written = []
    for threads in ("1", "2"):
        output = tmp_path / f"{threads}.profile"
        environment = {f"{library}_NUM_THREADS": threads for library in ("OMP", "OPENBLAS", "MKL")}
        subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "trace", output], env=environment, check=True)
        written.append(output.read_bytes())
    assert written[0] == written[1]


def test_clusters_hold_at_most_their_share(half, profile):
    assert profile.sizes.sum() == len(half)
    assert profile.sizes.max() <= 48  # 384 / 8


def test_a_profile_says_where_it_comes_from(half, profile):
    assert profile.trace_digest == half.digest()
    assert (profile.model, profile.geometry, profile.seed) == ("tiny-moe", ModelGeometry(5, 64, 4), 0)
    np.testing.assert_array_equal(profile.transform.idf, fit_idf(half.prefill))
    assert 0.8 < profile.cohesion < 1
    assert profile.donor is None


def test_labels_are_counted_but_never_used(half, profile):
    unlabelled = fit(replace(half, labels=("",) * 384), GROUPS, pairs=PAIRS)
    np.testing.assert_array_equal(unlabelled.centroids, profile.centroids)
    assert (unlabelled.label_names, unlabelled.labels, unlabelled.purity) == ((), ("",) * GROUPS, 0)
    assert profile.label_names == tuple(sorted(set(half.labels)))
    assert dict(zip(profile.label_names, profile.label_counts.sum(axis=0), strict=True)) == Counter(half.labels)
    np.testing.assert_array_equal(profile.label_counts.sum(axis=1), profile.sizes)
    assert profile.purity > 0.8
    assert unlabelled.rho_within_labels is None


def test_greedy_layers_foretell_decoding_better_than_all(half, profile):
    assert profile.layer_choice.rho_of_kept > profile.layer_choice.rho_of_all
    everything = fit(half, GROUPS, starts=1, layers="all", pairs=PAIRS)
    assert everything.transform.layers == (0, 1, 2, 3, 4)
    assert everything.layer_choice is None
    assert everything.rho.value < profile.rho.value  # both on the same fresh pairs


def test_rho_is_measured_on_pairs_that_did_not_choose_the_layers(profile):
    assert profile.rho.pairs == PAIRS
    assert profile.rho.value != profile.layer_choice.rho_of_kept
    assert profile.rho.low < profile.layer_choice.rho_of_kept < profile.rho.high
    assert profile.rho_within_labels.pairs < PAIRS / 4  # of 8 labels


def test_each_purpose_has_a_random_stream_of_its_own(half, profile):
    # another number of pairs: the clusters are the same
    everything = [fit(half, GROUPS, starts=2, layers="all", pairs=pairs) for pairs in (100, 2000)]
    np.testing.assert_array_equal(everything[0].centroids, everything[1].centroids)
    # one start or another: rho is the same
    assert fit(half, GROUPS, starts=1, pairs=PAIRS).rho == profile.rho


@pytest.mark.parametrize("kind", KINDS[:4])
def test_every_kind_of_counts_makes_pure_clusters(half, kind):
    found = fit(half, GROUPS, starts=2, kind=kind, layers="all", pairs=1000)
    assert found.transform.kind == kind
    assert (found.transform.idf is not None) == (kind == "count_idf")
    assert found.purity > 0.7


# --- laws ---------------------------------------------------------------------------------------------


def partition(profile, trace):
    """The sets of requests that are nearest to the same centroid."""
    nearest = (profile.transform.apply(values_of(trace, profile.transform.kind)) @ profile.centroids.T).argmax(axis=1)
    return {frozenset(np.flatnonzero(nearest == k).tolist()) for k in np.unique(nearest)}


def permuted(trace, layers, experts):
    """The trace of a model with these layers in another order, and the same order of experts in each."""

    def order(array):
        return np.ascontiguousarray(array[:, layers][:, :, experts])

    return replace(
        trace, prefill=order(trace.prefill), decode=order(trace.decode),
        decode_ids=None, gate_prob=None, gate_logit=None,
    )  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 32), st.permutations(range(5)), st.integers(0, 1 << 32))
def test_order_of_layers_and_experts_means_nothing(seed, layers, shuffle):
    trace = tiny_moe_trace().select(np.random.default_rng(seed).permutation(768)[:60])
    experts = np.random.default_rng(shuffle).permutation(64)
    options = {"starts": 2, "pairs": 500, "seed": seed}
    one, other = fit(trace, 4, **options), fit(permuted(trace, layers, experts), 4, **options)
    assert sorted(layers[i] for i in other.transform.layers) == list(one.transform.layers)
    np.testing.assert_array_equal(one.transform.idf[layers][:, experts], other.transform.idf)
    # the norm of a signature is a sum over dimensions, so its last bit follows their order: a tie may open
    assert other.rho.value == pytest.approx(one.rho.value, abs=1e-3)
    np.testing.assert_array_equal(one.label_counts, other.label_counts)
    assert partition(one, trace) == partition(other, permuted(trace, layers, experts))


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(12)))
def test_order_of_requests_means_nothing_where_clusters_are_plain(order):
    # three kinds of requests, four each: whatever seeds are drawn, some start finds them
    trace = one_expert_each(*[0, 1, 2] * 4)
    trace = replace(trace, labels=tuple("abc" * 4)).select(order)
    found = fit(trace, 3, starts=20)
    assert sorted(zip(found.labels, found.shares, found.sizes.tolist(), strict=True)) == [
        (label, 1, 4) for label in "abc"
    ]


# --- at the edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", [0, 4])
def test_too_few_requests_are_refused(clusters):
    with pytest.raises(InputError, match=rf"3 requests cannot make {clusters} clusters; .*ask for 1 to 3 clusters"):
        fit(small_trace("abc"), clusters)


def test_as_many_clusters_as_requests_is_fine():
    assert fit(small_trace("abc"), 3).sizes.tolist() == [1, 1, 1]


def test_one_cluster_holds_all():
    found = fit(small_trace("aab"), 1)
    assert (found.sizes.tolist(), found.labels, found.label_counts.tolist()) == ([3], ("a",), [[2, 1]])


def test_identical_requests_are_divided_evenly_and_have_no_rho():
    trace = one_expert_each(0, 0, 0, 0)
    found = fit(trace, 2, kind="count", layers="all")
    assert found.sizes.tolist() == [2, 2]
    assert (found.rho, found.rho_within_labels, found.cohesion) == (None, None, pytest.approx(1))
    with pytest.raises(InputError, match=r"layers cannot be chosen .* all equally far apart; .*`--layers all`"):
        fit(trace, 2, kind="count")


def test_one_label_makes_both_rhos_equal():
    found = fit(small_trace("aaaaaa"), 2)
    assert found.rho.value == found.rho_within_labels.value
    assert found.purity == 1


def test_without_output_counts_all_layers_must_be_kept():
    trace = small_trace("abcd")
    silent = trace.decode_covered.copy()
    silent[1] = 0
    decode = trace.decode.copy()
    decode[1] = 0
    trace = replace(trace, decode=decode, decode_covered=silent)
    with pytest.raises(InputError, match=r"1 of 4 requests have no output counts; .*`--layers all`"):
        fit(trace, 2)
    found = fit(trace, 2, layers="all")
    assert (found.rho, found.rho_within_labels) == (None, None)
    assert found.sizes.tolist() == [2, 2]


def test_partly_counted_prompts_are_refused_with_the_first_named():
    with pytest.raises(InputError, match=r"2 of 3 prompts were only partly counted \(request 1: 5 of 9 tokens\)"):
        fit(small_trace("abc", prefill_tokens=np.array([5, 9, 8])), 2)


def test_prompts_without_direction_are_refused():
    geometry = ModelGeometry(1, 3, 1)
    prefill = np.array([[[5, 0, 0]], [[3, 2, 0]], [[5, 0, 0]]], np.uint8)  # all use expert 0, whose weight is 0
    parts = [ExpertCounts(geometry, counts, 5, 5) for counts in prefill]
    trace = build_trace("m", [TraceRecord(part, part, 6, prompt_hash([i])) for i, part in enumerate(parts)])
    with pytest.raises(InputError, match=r"2 of 3 signatures are zero \(first: request 0\)"):
        fit(trace, 2, layers="all")


def test_prompts_that_all_use_every_expert_are_refused():
    geometry = ModelGeometry(1, 2, 1)
    part = ExpertCounts(geometry, np.array([[2, 3]], np.uint8), 5, 5)
    trace = build_trace("m", [TraceRecord(part, part, 6, prompt_hash([i])) for i in range(3)])
    with pytest.raises(InputError, match="every request used every expert"):
        fit(trace, 2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seed": -1}, "the seed must not be negative, got -1"),
        ({"starts": 0}, "starts and rounds must be at least 1"),
        ({"kind": "count_log"}, "no kind 'count_log'"),
        ({"layers": "best"}, "layers 'best' are neither 'greedy' nor 'all' nor positions"),
        ({"layers": (0, 2)}, r"layers \[0, 2\] are not ascending, distinct whole numbers from 0 to 1"),
        ({"layers": ()}, r"layers \[\] are not"),
        ({"pairs": -1}, "neither can be negative"),
        ({"pairs": 1}, "over 1 pairs of requests, either"),
    ],
)
def test_wrong_options_are_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        fit(small_trace("abc"), 2, **options)


# --- kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gate_prob", "gate_logit"])
def test_gate_sums_make_signatures_where_they_were_recorded(kind):
    trace = small_trace("abcd")
    assert values_of(trace, kind) is getattr(trace, kind)
    found = fit(trace, 2, kind=kind, layers="all")
    assert found.transform.kind == kind
    without = replace(trace, **{kind: None})
    with pytest.raises(InputError, match=f"need the trace's {kind} sums, which were not recorded"):
        fit(without, 2, kind=kind)


def test_the_kept_layers_are_those_of_a_brute_force_search_over_two():
    trace = small_trace("abcdefgh")
    i, j = np.triu_indices(8, 1)
    pairs = np.stack([i, j], axis=1)
    decode = cosines(trace.decode, pairs)
    idf = fit_idf(trace.prefill)
    rho = {
        layers: spearman(cosines(SignatureTransform(GEOMETRY, layers, idf=idf).apply(trace.prefill), pairs), decode)
        for layers in [(0,), (1,), (0, 1)]
    }
    found = fit(trace, 2)
    assert found.transform.layers == max(rho, key=rho.get)
    assert found.layer_choice.rho_of_kept == pytest.approx(max(rho.values()))
    assert found.layer_choice.rho_of_all == pytest.approx(rho[0, 1])
    assert found.rho.value == pytest.approx(max(rho.values()))  # so few requests have no other pairs
