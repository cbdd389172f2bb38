from dataclasses import replace

import numpy as np
import pytest

from coterie.activations import ActivationTrace
from coterie.analysis import judge, report_clusters
from coterie.calibration import Donor, Profile, fit, transfer
from coterie.core import ModelGeometry, prompt_hash
from coterie.errors import InputError
from coterie.signature import SignatureTransform, fit_idf
from traces import tiny_moe_trace

GROUPS = 8
PAIRS = 1000
FEW = 48


def made_up(model, geometry, prefer, *, seed, tokens=8, first=0):
    """A trace in which request i mostly uses expert `prefer[i]` of each layer, besides random ones."""
    rng = np.random.default_rng(seed)
    N, L, E = len(prefer), geometry.layers, geometry.experts
    noise = rng.gumbel(size=(N, tokens, L, E))
    noise[np.arange(N), :, :, prefer] += 4
    ids = np.argpartition(noise, -geometry.top_k, axis=-1)[..., -geometry.top_k :]
    counts = (ids[..., None] == np.arange(E)).sum(axis=(1, 3)).astype(np.uint8)
    return ActivationTrace(
        model, geometry, counts, counts, *[np.full(N, tokens)] * 2, np.full(N, tokens + 1), np.full(N, tokens),
        tuple(prompt_hash([first + i]) for i in range(N)), tuple(f"topic {k}" for k in prefer),
    )  # fmt: skip


TOPICS = np.arange(60) % 3


@pytest.fixture(scope="module")
def donor_trace():
    return made_up("donor", ModelGeometry(2, 16, 2), TOPICS, seed=1)


@pytest.fixture(scope="module")
def donor(donor_trace):
    return fit(donor_trace, 3, pairs=PAIRS)


@pytest.fixture(scope="module")
def few():
    """Another model of another geometry, in which topic k uses expert 9 - k, on the donor's first 12 prompts."""
    trace = made_up("new", ModelGeometry(4, 24, 1), 9 - TOPICS[:12], seed=2)
    return replace(trace, labels=tuple(f"topic {k}" for k in TOPICS[:12]))


def test_cluster_k_of_the_new_model_holds_the_prompts_of_the_donors_cluster_k(few, donor_trace, donor):
    found = transfer(few, donor_trace, donor)
    assert found.labels == donor.labels
    assert (found.purity, found.sizes.tolist()) == (1, [4, 4, 4])
    for k, label in enumerate(found.labels):
        leading = {one.expert for one in found.characteristic_experts(k, most=4)}
        assert leading == {9 - int(label[-1])}  # the expert of that topic, in each of the four layers


def test_a_transferred_profile_says_where_its_clusters_come_from(few, donor_trace, donor):
    found = transfer(few, donor_trace, donor, seed=5)
    assert found.donor == Donor("donor", donor_trace.digest())
    assert (found.model, found.geometry, found.seed) == ("new", few.geometry, 5)
    assert found.trace_digest == few.digest()
    assert found.transform.layers == (0, 1, 2, 3)
    assert found.rho.pairs == 66  # 12 * 11 / 2
    assert found.layer_choice is None


def test_centroids_are_the_directions_of_the_inherited_groups(few, donor_trace, donor):
    found = transfer(few, donor_trace, donor)
    rows = SignatureTransform(few.geometry, (0, 1, 2, 3), idf=fit_idf(few.prefill)).apply(few.prefill)
    for k, label in enumerate(donor.labels):
        total = rows[[i for i in range(12) if few.labels[i] == label]].astype(np.float64).sum(axis=0)
        np.testing.assert_allclose(found.centroids[k], total / np.linalg.norm(total), rtol=1e-5, atol=1e-7)


def test_prompts_that_the_donor_did_not_run_go_to_the_nearest_and_move_no_centroid(few, donor_trace, donor):
    hashes = (*few.prompt_hashes[:9], *(prompt_hash([1000 + i]) for i in range(3)))
    found = transfer(replace(few, prompt_hashes=hashes), donor_trace, donor)
    assert (found.purity, found.sizes.sum()) == (1, 12)
    nine = transfer(few.select(range(9)), donor_trace, donor)
    similarity = np.einsum("kd,kd->k", found.centroids, nine.centroids)
    assert similarity.min() > 0.99  # equal but for the IDF weights, which all twelve make


def test_rounds_go_on_by_balanced_clustering(few, donor_trace, donor):
    lopsided = few.select([0, 3, 6, 9, 1, 2])  # four of topic 0, one each of topics 1 and 2
    assert sorted(transfer(lopsided, donor_trace, donor).sizes) == [1, 1, 4]
    assert transfer(lopsided, donor_trace, donor, rounds=5).sizes.tolist() == [2, 2, 2]


def test_layers_can_be_chosen_by_the_few_prompts(few, donor_trace, donor):
    found = transfer(few, donor_trace, donor, layers="greedy")
    assert found.layer_choice.rho_of_kept >= found.layer_choice.rho_of_all


def test_the_same_arguments_give_the_same_bytes(few, donor_trace, donor, tmp_path):
    for name in ("one", "two"):
        transfer(few, donor_trace, donor, rounds=2).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert Profile.load(tmp_path / "one").donor == Donor("donor", donor_trace.digest())


def test_on_the_recorded_trace_few_prompts_with_a_donor_beat_few_prompts_alone():
    order = np.random.default_rng(0).permutation(768)
    trace = tiny_moe_trace()
    donor_trace, unseen, few = trace.select(order[:384]), trace.select(order[384:]), trace.select(order[:FEW])
    donor = fit(donor_trace, GROUPS, layers="all", pairs=PAIRS)
    alone = fit(few, GROUPS, layers="all", pairs=PAIRS)
    transferred = transfer(few, donor_trace, donor, pairs=PAIRS)
    full, scratch, transfer_ = (
        report_clusters(judge(unseen, profile), unseen.labels).purity for profile in (donor, alone, transferred)
    )
    assert transfer_ > scratch + 0.03
    assert transfer_ > full - 0.03


# --- refusals -----------------------------------------------------------------------------------------


def test_a_cluster_without_heirs_is_an_error_with_a_remedy(few, donor_trace, donor):
    hashes = (*few.prompt_hashes[:4:3], prompt_hash("new"))  # the donor ran two, both of topic 0
    narrow = replace(few.select([0, 3, 1]), prompt_hashes=hashes)
    with pytest.raises(InputError, match=r"2 of 3 prompts .* none of them is in 2 of its 3 clusters .*12 or more"):
        transfer(narrow, donor_trace, donor)


def test_no_common_prompt_is_an_error(few, donor_trace, donor):
    strangers = replace(few, prompt_hashes=tuple(prompt_hash([1000 + i]) for i in range(12)))
    with pytest.raises(InputError, match="0 of 12 prompts are in the donor's trace too"):
        transfer(strangers, donor_trace, donor)


def test_a_trace_of_another_model_than_the_donors_profile_is_refused(few, donor):
    with pytest.raises(InputError, match=r"the donor's trace is of new \(4 layers .* profile of donor \(2 layers"):
        transfer(few, few, donor)


def test_fewer_prompts_than_clusters_are_refused(few, donor_trace, donor):
    with pytest.raises(InputError, match="2 requests cannot make 3 clusters"):
        transfer(few.select([0, 1]), donor_trace, donor)


def test_partly_counted_prompts_of_either_side_are_refused(few, donor_trace, donor):
    def longer(trace):
        return replace(trace, prefill_tokens=trace.prefill_tokens + 1)

    for traces in ((longer(few), donor_trace), (few, longer(donor_trace))):
        with pytest.raises(InputError, match="prompts were only partly counted"):
            transfer(*traces, donor)


@pytest.mark.parametrize("options", [{"seed": -1}, {"rounds": -1}])
def test_negative_numbers_are_refused(few, donor_trace, donor, options):
    with pytest.raises(InputError, match="must not be negative"):
        transfer(few, donor_trace, donor, **options)
