"""The schedule and the batches of the training, which need no torch."""

from __future__ import annotations

import numpy as np
import pytest
from tiny.settings import Settings, draw_batch, learning_rate

SETTINGS = Settings(steps=1000, warmup=10, learning_rate=1.0, batch=4, length=8)
STREAMS = {"a": np.arange(100, dtype=np.uint16), "b": np.arange(1000, 1100, dtype=np.uint16)}


def test_the_rate_rises_then_falls_to_a_twentieth() -> None:
    assert learning_rate(SETTINGS, 0) == pytest.approx(0.1)  # a tenth of the warm-up
    assert learning_rate(SETTINGS, 500) == pytest.approx(0.05 + 0.95 / 2)  # the cosine's middle
    assert learning_rate(SETTINGS, 1000) == pytest.approx(0.05)


def test_a_batch_is_made_of_stretches_in_equal_shares() -> None:
    batch = draw_batch(SETTINGS, 3, STREAMS)
    assert batch.shape == (4, 8)
    assert (np.diff(batch, axis=1) == 1).all()
    assert ((batch >= 1000).all(axis=1) == [False, False, True, True]).all()


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    assert np.array_equal(draw_batch(SETTINGS, 3, STREAMS), draw_batch(SETTINGS, 3, STREAMS))
    assert not np.array_equal(draw_batch(SETTINGS, 3, STREAMS), draw_batch(SETTINGS, 4, STREAMS))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 4 sequences does not divide into 3 domains"):
        draw_batch(SETTINGS, 0, {**STREAMS, "c": STREAMS["a"]})
