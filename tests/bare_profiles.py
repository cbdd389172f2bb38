"""Profiles that come from no trace: centroids that a test can work out by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.calibration import Profile
from coterie.signature import SignatureTransform


def bare_profile(transform: SignatureTransform, centroids: npt.NDArray[np.float32], model: str = "m") -> Profile:
    """A profile of these `[K, D]` centroids, each of one request without a label."""
    return Profile(
        model=model,
        transform=transform,
        centroids=centroids,
        sizes=np.ones(len(centroids), np.int64),
        label_names=(),
        label_counts=np.zeros((len(centroids), 0), np.int64),
        trace_digest="0" * 32,
        seed=0,
        cohesion=1.0,
    )
