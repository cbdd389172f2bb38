from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from coterie.calibration import Donor, ExpertLead, LayerChoice, Profile, fit
from coterie.core import ModelGeometry
from coterie.errors import InputError, ProfileError
from coterie.quality import Rho
from coterie.signature import KINDS, SignatureTransform
from traces import COTERIE_TINY, tiny_moe_trace


@pytest.fixture
def profile():
    """Two clusters over layers 0 and 2 of three layers with two experts."""
    transform = SignatureTransform(ModelGeometry(3, 2, 1), (0, 2), idf=np.arange(6, dtype=np.float32).reshape(3, 2))
    return Profile(
        model="m",
        transform=transform,
        centroids=np.array([[0, 0.6, 0.8, 0], [0, 0, 0, 1]], np.float32),
        sizes=np.array([3, 1]),
        label_names=("code", "de", "fr"),
        label_counts=np.array([[2, 0, 0], [0, 0, 1]]),
        trace_digest="ab" * 16,
        seed=7,
        cohesion=0.9,
        rho=Rho(0.7, 0.6, 0.8, 6, 4),
        layer_choice=LayerChoice(0.75, 0.7),
        donor=Donor("other", "cd" * 16),
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.profile"


def rewrite(path, header=(b"", b""), **arrays):
    """Change a saved profile's header (one text for another of the same length) or its arrays."""
    with safe_open(path, framework="np") as file:
        metadata = {key: value.replace(*(part.decode() for part in header)) for key, value in file.metadata().items()}
    save_file(load_file(path) | arrays, path, metadata)


def same(one, other):
    """Whether two profiles hold the same values; their arrays are compared by dtype too."""
    for name in ("centroids", "sizes", "label_counts"):
        assert getattr(one, name).dtype == getattr(other, name).dtype
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for name in ("model", "label_names", "trace_digest", "seed", "cohesion", "rho", "rho_within_labels"):
        assert getattr(one, name) == getattr(other, name)
    assert (one.layer_choice, one.donor) == (other.layer_choice, other.donor)
    for name in ("geometry", "layers", "kind"):
        assert getattr(one.transform, name) == getattr(other.transform, name)
    np.testing.assert_array_equal(one.transform.idf, other.transform.idf)


def test_a_profile_survives_a_file(profile, path):
    profile.save(path)
    same(Profile.load(path), profile)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "count_idf"])
def test_so_does_one_of_each_kind_without_labels_or_measures(profile, path, kind):
    bare = Profile(
        "m", SignatureTransform(profile.geometry, (0, 2), kind), profile.centroids, profile.sizes,
        (), np.zeros((2, 0), np.int64), trace_digest="", seed=0, cohesion=0.5,
    )  # fmt: skip
    bare.save(path)
    same(Profile.load(path), bare)
    assert (bare.labels, bare.shares.tolist(), bare.purity) == (("", ""), [0, 0], 0)


def test_a_loaded_profile_saves_to_the_same_bytes(profile, tmp_path):
    profile.save(tmp_path / "one")
    Profile.load(tmp_path / "one").save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


# --- what follows from the labels and the centroids ---------------------------------------------------


def test_the_most_frequent_label_is_the_first_in_the_alphabet_among_equals(profile):
    tied = replace(profile, label_counts=np.array([[0, 1, 1], [0, 0, 0]]))
    assert tied.labels == ("de", "")
    np.testing.assert_allclose(tied.shares, [1 / 3, 0])  # requests without a label count in the whole


def test_purity_is_the_share_of_requests_with_their_clusters_label(profile):
    assert profile.labels == ("code", "fr")
    assert profile.purity == pytest.approx(3 / 4)  # 2 of 3 and 1 of 1


def test_characteristic_experts_lead_the_mean_of_the_other_centroids(profile):
    # layers 0 and 2 of two experts; the centroids are (0, 0.6, 0.8, 0) and (0, 0, 0, 1)
    np.testing.assert_allclose([one.lead for one in profile.characteristic_experts(0)], [0.8, 0.6], rtol=1e-6)
    assert [(one.layer, one.expert) for one in profile.characteristic_experts(0)] == [(2, 0), (0, 1)]
    assert profile.characteristic_experts(0, most=1) == profile.characteristic_experts(0)[:1]
    assert profile.characteristic_experts(1) == (ExpertLead(2, 1, 1.0),)


def test_with_three_clusters_the_lead_is_over_the_mean_of_two(profile):
    three = replace(
        profile, centroids=np.eye(3, 4, dtype=np.float32)[[0, 0, 1]], sizes=np.ones(3, np.int64),
        label_counts=np.zeros((3, 3), np.int64),
    )  # fmt: skip
    assert three.characteristic_experts(0) == (ExpertLead(0, 0, 0.5),)  # 1 - (1 + 0) / 2


def test_the_only_cluster_is_characterised_by_its_centroid(profile):
    only = replace(
        profile, centroids=profile.centroids[1:], sizes=profile.sizes[1:], label_counts=profile.label_counts[1:]
    )
    assert only.characteristic_experts(0) == (ExpertLead(2, 1, 1.0),)


@pytest.mark.parametrize("cluster", [-1, 2])
def test_there_is_no_character_of_a_cluster_that_is_not_there(profile, cluster):
    with pytest.raises(InputError, match=f"no cluster {cluster} among 2"):
        profile.characteristic_experts(cluster)


# --- contradictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": ""}, "the model's name is empty"),
        ({"sizes": np.array([], np.int64)}, "no clusters"),
        ({"sizes": np.array([3])}, r"centroids has shape \(2, 4\) float32, not \(1, 4\)"),
        ({"centroids": np.eye(2, dtype=np.float32)}, r"centroids has shape \(2, 2\) float32, not \(2, 4\)"),
        ({"centroids": np.eye(2, 4)}, "float64, not"),
        ({"centroids": 2 * np.eye(2, 4, dtype=np.float32)}, "centroid 0 has length 2, not 1"),
        (
            {"centroids": np.diag([1, np.nan, 1, 1]).astype(np.float32)[:2]},
            "centroids holds a value that is not finite",
        ),
        ({"sizes": np.array([3, -1])}, "a cluster of -1 requests"),
        ({"label_names": ("code",)}, r"label_counts has shape \(2, 3\) int64, not \(2, 1\)"),
        ({"label_names": ("", "a", "b")}, "label_names are not ascending"),
        ({"label_names": ("a", "c", "b")}, "label_names are not ascending"),
        ({"label_names": ("a", "b", "b")}, "label_names are not ascending"),
        ({"label_counts": np.array([[2, 0, 0], [0, -1, 1]])}, "-1 requests of a label"),
        ({"label_counts": np.array([[2, 0, 0], [1, 0, 1]])}, "cluster 1 has more labels than requests"),
        ({"cohesion": float("nan")}, "cohesion holds nan, which is not from -1 to 1"),
        ({"rho": Rho(0.5, 0.4, 1.2, 9, 9)}, "rho holds 1.2"),
        ({"rho_within_labels": Rho(0.5, float("nan"), 0.6, 9, 9)}, "rho_within_labels holds nan"),
        ({"layer_choice": LayerChoice(2, None)}, "layer_choice holds 2"),
    ],
)
def test_a_contradiction_is_named(profile, changes, problem):
    with pytest.raises(ProfileError, match=problem):
        replace(profile, **changes)


def test_a_truncated_profile_is_refused_with_file_and_remedy(profile, path):
    profile.save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ProfileError, match=r"some.profile: truncated .*; make it with `coterie fit`"):
        Profile.load(path)


def test_alien_files_are_refused(tmp_path):
    tiny_moe_trace().save(tmp_path / "trace")
    with pytest.raises(ProfileError, match="holds a trace, not a profile"):
        Profile.load(tmp_path / "trace")
    with pytest.raises(ProfileError, match="not a profile of coterie"):
        Profile.load(COTERIE_TINY / "model.safetensors")
    with pytest.raises(
        ProfileError, match=r"config.json: JSON, such as a prompt file, not a profile; make it with `coterie fit`"
    ):
        Profile.load(COTERIE_TINY / "config.json")
    with pytest.raises(ProfileError, match="nothing: cannot be read: No such file"):
        Profile.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("header", "arrays", "problem"),
    [
        ((b'"version":2', b'"version":1'), {}, "a profile of schema version 1; this release reads 2"),
        ((b"count_idf", b"count_log"), {}, "damaged header: Invalid enum value 'count_log'"),
        ((b'"transform":"count_idf"', b'"transform":"count"    '), {}, "kind count takes no idf"),
        ((b'"low":0.6', b'"low":6.0'), {}, "rho holds 6.0"),
        ((b'"low":0.6', b'"low":nil'), {}, "damaged header"),
        ((b'"layers":[0,2]', b'"layers":[2,0]'), {}, r"layers \[2, 0\] are not ascending, distinct whole"),
        ((b'"layers":[0,2]', b'"layers":[0,3]'), {}, "are not ascending, distinct whole numbers from 0 to 2"),
        ((b'"experts":2', b'"experts":3'), {}, "idf has shape"),
        ((b'"top_k":1', b'"top_k":9'), {}, "top_k must be a whole number from 1 to 2"),
        ((b'"seed":7', b'"sead":7'), {}, "damaged header"),
        ((b"", b""), {"centroids": np.zeros((2, 4), np.float32)}, "centroid 0 has length 0, not 1"),
        ((b"", b""), {"idf": np.full((3, 2), -1, np.float32)}, "idf holds a weight that is negative"),
        ((b"", b""), {"extra": np.zeros(1, np.float32)}, "unknown arrays: extra"),
    ],
)
def test_a_damaged_file_is_refused_with_file_and_remedy(profile, path, header, arrays, problem):
    profile.save(path)
    rewrite(path, header, **arrays)
    with pytest.raises(ProfileError, match=f"some.profile: .*{problem}.*; make it with `coterie fit`"):
        Profile.load(path)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "profile"
    fit(tiny_moe_trace().select(range(0, 768, 96)), 2, starts=1).save(path)
    return path.read_bytes()


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_byte_is_a_profile_error_or_harmless(fitted, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("profiles") / "profile"
    content = bytearray(fitted)
    at = data.draw(st.integers(0, 1500) | st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with suppress(ProfileError):
        Profile.load(path)
