from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from coterie.calibration import Profile, fit
from coterie.core import ModelGeometry
from coterie.errors import ProfileError
from coterie.signature import SignatureTransform
from traces import FIXTURES, tiny_moe_trace


@pytest.fixture
def profile():
    """Two clusters over layers 0 and 2 of three layers with two experts."""
    transform = SignatureTransform(ModelGeometry(3, 2, 1), (0, 2), idf=np.arange(6, dtype=np.float32).reshape(3, 2))
    return Profile(
        model="m",
        transform=transform,
        centroids=np.array([[0, 0.6, 0.8, 0], [0, 0, 0, 1]], np.float32),
        sizes=np.array([3, 1]),
        labels=("code", "fr"),
        shares=np.array([2 / 3, 1], np.float32),
        trace_digest="ab" * 16,
        seed=7,
        cohesion=0.9,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.profile"


def rewrite(path, header=(b"", b""), **arrays):
    """Change a saved profile's header (one text for another of the same length) or its arrays."""
    with safe_open(path, framework="np") as file:
        metadata = {key: value.replace(*(part.decode() for part in header)) for key, value in file.metadata().items()}
    save_file(load_file(path) | arrays, path, metadata)


def test_a_profile_survives_a_file(profile, path):
    profile.save(path)
    loaded = Profile.load(path)
    assert loaded.transform.layers == (0, 2)
    assert (loaded.model, loaded.geometry, loaded.labels) == ("m", ModelGeometry(3, 2, 1), ("code", "fr"))
    assert (loaded.trace_digest, loaded.seed, loaded.cohesion) == ("ab" * 16, 7, 0.9)
    for one, other in [
        (loaded.centroids, profile.centroids),
        (loaded.sizes, profile.sizes),
        (loaded.shares, profile.shares),
        (loaded.transform.idf, profile.transform.idf),
    ]:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_a_loaded_profile_saves_to_the_same_bytes(profile, tmp_path):
    profile.save(tmp_path / "one")
    Profile.load(tmp_path / "one").save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_purity_weighs_clusters_by_size(profile):
    assert profile.purity == pytest.approx(3 / 4)  # (3 * 2/3 + 1 * 1) / 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": ""}, "the model's name is empty"),
        ({"labels": ()}, r"centroids has shape \(2, 4\) float32, not \(0, 4\)"),
        ({"labels": ("a",)}, "centroids has shape"),
        ({"centroids": np.eye(2, dtype=np.float32)}, r"centroids has shape \(2, 2\) float32, not \(2, 4\)"),
        ({"centroids": np.eye(2, 4)}, "float64, not"),
        ({"centroids": 2 * np.eye(2, 4, dtype=np.float32)}, "centroid 0 has length 2, not 1"),
        (
            {"centroids": np.diag([1, np.nan, 1, 1]).astype(np.float32)[:2]},
            "centroids holds a value that is not finite",
        ),
        ({"sizes": np.array([3])}, "sizes has shape"),
        ({"sizes": np.array([3, -1])}, "a cluster of -1 requests"),
        ({"shares": np.array([0.5, 1.5], np.float32)}, "a share of a label is outside 0..1"),
        ({"shares": np.array([0.5, np.nan], np.float32)}, "shares holds a value that is not finite"),
        ({"cohesion": float("nan")}, "cohesion nan is not a mean of cosines"),
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
        Profile.load(FIXTURES / "tiny-moe" / "model.safetensors")
    with pytest.raises(ProfileError, match=r"config.json: truncated or not a safetensors file"):
        Profile.load(FIXTURES / "tiny-moe" / "config.json")
    with pytest.raises(ProfileError, match="nothing: cannot be read: No such file"):
        Profile.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("header", "arrays", "problem"),
    [
        ((b'"version":1', b'"version":2'), {}, "a profile of schema version 2; this release reads 1"),
        ((b"count_idf", b"count_log"), {}, "transform 'count_log' is not count_idf"),
        ((b'"layers":[0,2]', b'"layers":[2,0]'), {}, r"layers \[2, 0\] are not ascending, distinct and below 3"),
        ((b'"layers":[0,2]', b'"layers":[0,3]'), {}, "are not ascending, distinct and below 3"),
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


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_byte_is_a_profile_error_or_harmless(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("profiles") / "profile"
    fit(tiny_moe_trace().select(range(0, 768, 96)), 2, starts=1).save(path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, 1500) | st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with suppress(ProfileError):
        Profile.load(path)
