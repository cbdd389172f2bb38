import math

import numpy as np
import pytest

from coterie.clustering import balanced_kmeans
from coterie.errors import InputError
from coterie.routing.drift import Gain, held_out_gain

DIMENSIONS = 48
TOPICS = 8


def requests(rng, shares, number, noise=0.6):
    """Signatures of topics in the given shares, each topic an axis with noise around it."""
    topics = rng.choice(len(shares), size=number, p=np.asarray(shares) / np.sum(shares))
    rows = np.eye(DIMENSIONS)[topics] + noise * np.abs(rng.normal(size=(number, DIMENSIONS))) / math.sqrt(DIMENSIONS)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


EVEN = np.ones(TOPICS)
TWO = np.array([1, 1, 0, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def centroids():
    """Of a profile that was fitted to an even mix."""
    rng = np.random.default_rng(0)
    return balanced_kmeans(requests(rng, EVEN, 400), TOPICS, rng).centroids


def test_sampling_noise_raises_no_alarm(centroids):
    """Nominally one in 740 for a gain of zero; without drift the gain is below zero, so 100 windows raise none."""
    rng = np.random.default_rng(1)
    gains = [held_out_gain(requests(rng, EVEN, number), centroids) for number in [64] * 80 + [128] * 20]
    assert not any(gain.significant for gain in gains)
    assert np.mean([gain.mean for gain in gains]) < 0


def test_alternating_traffic_raises_no_alarm(centroids):
    """Every other request would make halves of different topics, each refit to half of them."""
    rng = np.random.default_rng(5)
    rows = np.concatenate([requests(rng, np.eye(TOPICS)[i % TOPICS], 1) for i in range(64)])
    assert not held_out_gain(rows, centroids).significant


def test_a_mix_of_two_topics_raises_an_alarm_in_every_window(centroids):
    rng = np.random.default_rng(2)
    assert all(held_out_gain(requests(rng, TWO, 64), centroids).significant for _ in range(20))


def test_new_topics_raise_an_alarm(centroids):
    rng = np.random.default_rng(3)
    new = [0] * TOPICS + [1] * TOPICS
    assert all(held_out_gain(requests(rng, new, 64), centroids).significant for _ in range(20))


def test_centroids_fitted_to_what_comes_now_raise_hardly_an_alarm_again():
    """Of two topics a window may by chance hold three eighths and five, and balance then moves requests together."""
    rng = np.random.default_rng(4)
    fitted = balanced_kmeans(requests(rng, TWO, 400), TOPICS, rng).centroids
    assert sum(held_out_gain(requests(rng, TWO, 64), fitted).significant for _ in range(50)) <= 1


def test_the_gain_written_out_for_four_requests():
    # One centroid on axis 0, all requests on axis 1: a refit to either half is axis 1, where the other half is too.
    rows = np.tile([0.0, 1.0], (4, 1))
    gain = held_out_gain(rows, np.array([[1.0, 0.0]]))
    assert (gain.mean, gain.error, gain.z) == (1.0, 0.0, math.inf)
    assert gain.significant


def test_nothing_to_gain_is_nothing_significant():
    rows = np.tile([0.0, 1.0], (4, 1))
    gain = held_out_gain(rows, np.array([[0.0, 1.0]]))
    assert (gain.mean, gain.z, gain.significant) == (0.0, 0.0, False)


@pytest.mark.parametrize(("mean", "significant"), [(0.31, True), (0.30, False), (-0.5, False)])
def test_three_standard_errors_are_the_bound(mean, significant):
    assert Gain(mean, 0.1).significant is significant


def test_too_few_requests_are_refused(centroids):
    with pytest.raises(InputError, match="7 rows cannot make 8 clusters"):
        held_out_gain(requests(np.random.default_rng(0), EVEN, 15), centroids)
